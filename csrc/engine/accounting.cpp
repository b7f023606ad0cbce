#include "engine/accounting.h"

#include <algorithm>
#include <chrono>

namespace bagua {

int64_t now_ns() {
  return std::chrono::duration_cast<std::chrono::nanoseconds>(
             std::chrono::steady_clock::now().time_since_epoch())
      .count();
}

void OverlapClock::caller_goes_on(int64_t now) {
  const int64_t before = exposed_ns_;
  exposed_ns_ = exposed_ns(now);
  longest_wait_ns_ = std::max(longest_wait_ns_, exposed_ns_ - before);
  blocked_since_ = 0;
}

int64_t OverlapClock::exposed_ns(int64_t now) const {
  return exposed_ns_ + (blocked_since_ ? std::max<int64_t>(0, now - blocked_since_) : 0);
}

void OverlapClock::lane_begins(int64_t now) {
  if (running_++ > 0) return;
  running_since_ = now;
  exposed_before_ = exposed_ns(now);
}

void OverlapClock::lane_ends(int64_t now) {
  if (--running_ > 0) return;
  const int64_t busy = now - running_since_;
  busy_ns_ += busy;
  hidden_ns_ += busy - (exposed_ns(now) - exposed_before_);
}

BucketAccount::BucketAccount(const CountingCommunicators& communicators, OverlapClock& clock)
    : communicators_(communicators),
      start_ns_(now_ns()),
      exposed_before_(clock.exposed_ns(start_ns_)),
      before_(traffic()) {
  clock.lane_begins(start_ns_);
}

void BucketAccount::close(OverlapClock& clock, int64_t ready_ns, std::optional<bool> finite,
                          BucketStats& stats) const {
  const int64_t end = now_ns();
  clock.lane_ends(end);
  const int64_t busy = end - start_ns_;
  stats.rounds += 1;
  stats.traffic += traffic() - before_;
  stats.busy_ns += busy;
  stats.waiting_ns += start_ns_ - ready_ns;
  stats.hidden_ns += busy - (clock.exposed_ns(end) - exposed_before_);
  if (finite) stats.nonfinite_rounds = stats.nonfinite_rounds.value_or(0) + (*finite ? 0 : 1);
}

// Exact, because only this lane uses the communicators.
Traffic BucketAccount::traffic() const {
  Traffic total{};
  for (const auto& communicator : communicators_) total += communicator->traffic();
  return total;
}

}  // namespace bagua
