// Schedules in which a rank is silent, or has another plan: every wait ends, and tells what
// happened.
#pragma once

#include <atomic>
#include <functional>
#include <string>
#include <thread>
#include <utility>

#include "schedules/rounds.h"

namespace bagua::stress {

// Does something in a separate thread once so many points have been passed, unless it is
// destroyed before.
class AtPoint {
 public:
  AtPoint(Delays delays, int64_t point, std::function<void()> what)
      : thread_([this, delays = std::move(delays), point, what = std::move(what)] {
          while (delays->passed() < point) {
            if (over_) return;
            std::this_thread::sleep_for(std::chrono::microseconds(50));
          }
          what();
        }) {}
  ~AtPoint() {
    over_ = true;
    thread_.join();
  }

 private:
  std::atomic<bool> over_{false};
  std::thread thread_;
};

inline void a_wait_ends_at_the_deadline(Random& random, const Delays& delays) {
  const milliseconds timeout(between(random, 100, 300));
  const World world(random, 2, timeout, kSmall, delays);
  const int silent = between(random, 0, world.ranks - 1);
  const bool marks = between(random, 0, 1);
  const uint64_t seed = random();
  std::atomic<int> ended{0};
  const auto endings = run_ranks(world, [&](int rank) {
    Random own(seed + rank);
    RankEngine mine(world, rank);
    mine.begin();
    if (rank == silent) {
      if (marks) mine.mark(own, 1);
      while (ended < world.ranks - 1) std::this_thread::sleep_for(milliseconds(2));
      return;
    }
    try {
      mine.mark(own);
      mine.engine().wait();
    } catch (...) {
      ++ended;
      throw;
    }
  });
  expect_deadline(endings, concat("no result within ", timeout.count(), " ms"), silent);
}

inline void another_plan_is_found_before_bytes_are_mixed(Random& random, const Delays& delays) {
  const World world(random, 2, kPatient, kSmall, delays);
  const int other = between(random, 0, world.ranks - 1);
  const uint64_t seed = random();
  std::atomic<int> ops{0};
  const auto endings = run_ranks(world, [&](int rank) {
    Random own(seed + rank);
    RankEngine mine(world, rank, [&](int, const Round&) { ++ops; }, rank == other ? 2 : 1);
    while (true) run_turbulent_round(world, mine, rank, own, seed);
  });
  expect_everywhere(endings, "ranks differ in the bucket plan");
  expect(ops == 0, ops.load(), " ops ran before the ranks agreed");
}

}  // namespace bagua::stress
