// Waiting for another process: briefly on the processor, then in the kernel.
#pragma once

#include <chrono>

#include "comm/shm/layout.h"

namespace bagua {

// How long a wait looks for itself before it sleeps.
struct Spin {
  int looks;   // with a pause of the processor after each
  int yields;  // with the processor offered to other threads after each

  // For a group of `ranks` ranks on the processors that this process may use: none where ranks
  // share processors, since the awaited one may need this one.
  static Spin for_ranks(int ranks);
};

// Wakes the rank whose bell it is. What it may wait for has been written before.
void ring(Bell& bell) noexcept;

// Sleeps until the bell is rung, at most `limit`, unless `over()` is true; `over` is asked after
// the bell would be heard, so nothing that is rung is missed. One thread waits at a bell.
void sleep_at(Bell& bell, uint32_t rings, std::chrono::nanoseconds limit) noexcept;
void pause_processor() noexcept;
void yield_processor() noexcept;

// Returns when `over()` is true, at the latest when the bell has been rung or `limit` is over.
template <typename Over>
void wait_for_ring(Bell& bell, Spin spin, std::chrono::nanoseconds limit, Over over) {
  for (int look = 0; look < spin.looks; ++look) {
    if (over()) return;
    pause_processor();
  }
  for (int yield = 0; yield < spin.yields; ++yield) {
    if (over()) return;
    yield_processor();
  }
  bell.sleeping.store(1);
  const uint32_t rings = bell.rings.load();
  if (!over()) sleep_at(bell, rings, limit);
  bell.sleeping.store(0);
}

}  // namespace bagua
