// A wall clock that jumps by an hour to and fro, for processes that load it before their libraries.
// The clock of the machine stays alone: other programs have it too.
#include <cstdlib>

#include <sys/syscall.h>
#include <sys/time.h>
#include <time.h>
#include <unistd.h>

namespace {
// By an hour ahead or back, of another sign on each rank and in each 0.3 s of the steady clock.
long jump() {
  timespec steady;
  syscall(SYS_clock_gettime, CLOCK_MONOTONIC, &steady);
  const long period = (steady.tv_sec * 1000 + steady.tv_nsec / 1000000) / 300;
  const char* rank = getenv("RANK");
  return ((period + (rank ? atoi(rank) : 0)) % 2 ? 3600 : -3600);
}
}  // namespace

extern "C" int clock_gettime(clockid_t clock, timespec* now) noexcept {
  const long status = syscall(SYS_clock_gettime, clock, now);
  if (status == 0 && (clock == CLOCK_REALTIME || clock == CLOCK_REALTIME_COARSE))
    now->tv_sec += jump();
  return static_cast<int>(status);
}
extern "C" int gettimeofday(timeval* now, void*) noexcept {
  timespec precise;
  clock_gettime(CLOCK_REALTIME, &precise);
  *now = {precise.tv_sec, precise.tv_nsec / 1000};
  return 0;
}
extern "C" time_t time(time_t* result) noexcept {
  timespec now;
  clock_gettime(CLOCK_REALTIME, &now);
  if (result) *result = now.tv_sec;
  return now.tv_sec;
}
