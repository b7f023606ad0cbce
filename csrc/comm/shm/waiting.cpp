#include "comm/shm/waiting.h"

#include <algorithm>
#include <ctime>

#include <linux/futex.h>
#include <sched.h>
#include <sys/syscall.h>
#include <unistd.h>

namespace bagua {
namespace {

static_assert(sizeof(std::atomic<uint32_t>) == sizeof(uint32_t));

int usable_processors() {
  cpu_set_t set;
  return sched_getaffinity(0, sizeof set, &set) == 0 ? CPU_COUNT(&set) : 1;
}

}  // namespace

Spin Spin::for_ranks(int ranks) {
  if (ranks > usable_processors()) return {.looks = 20, .yields = 2};
  return {.looks = 200, .yields = 20};
}

void ring(Bell& bell) noexcept {
  bell.rings.fetch_add(1);
  if (bell.sleeping.load() == 0) return;
  syscall(SYS_futex, &bell.rings, FUTEX_WAKE, 1, nullptr, nullptr, 0);
}

void sleep_at(Bell& bell, uint32_t rings, std::chrono::nanoseconds limit) noexcept {
  constexpr int64_t kSecond = 1000000000;
  const int64_t count = std::max<int64_t>(0, limit.count());
  const timespec length{.tv_sec = count / kSecond, .tv_nsec = count % kSecond};
  syscall(SYS_futex, &bell.rings, FUTEX_WAIT, rings, &length, nullptr, 0);
}

void pause_processor() noexcept {
#if defined(__x86_64__)
  __builtin_ia32_pause();
#elif defined(__aarch64__)
  asm volatile("yield");
#endif
}

void yield_processor() noexcept { sched_yield(); }

}  // namespace bagua
