// Cost of a bucket, and how much of it was hidden from the caller.
#pragma once

#include <cstdint>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "comm/counting_communicator.h"

namespace bagua {

int64_t now_ns();

using CountingCommunicators = std::vector<std::shared_ptr<CountingCommunicator>>;

// Sums over all rounds since construction. Times in nanoseconds, of the bucket's own lane: lanes
// run at the same time, so sums over buckets may exceed the time that has passed.
struct BucketStats {
  std::string name;
  std::vector<std::string> ops;
  int64_t bytes;  // of the flat bucket
  int64_t rounds;
  Traffic traffic;     // wire_ns: inside communicator calls
  int64_t busy_ns;     // running ops, wire included; the rest is encoding and arithmetic
  int64_t waiting_ns;  // from its last slot's mark to its first op: for earlier buckets of the lane
                       // and for the ranks' agreement
  int64_t hidden_ns;   // busy while the caller was not blocked
  // Rounds after which the result held NaN or infinity. Empty on a device, where the lane does not
  // look because it would have to wait.
  std::optional<int64_t> nonfinite_rounds;
};

// Not thread-safe: the engine's mutex guards it. Every `now` is of now_ns() and not before the last
// one but for the time that a mutex is waited for. Times are wall-clock: concurrent lanes
// count once.
class OverlapClock {
 public:
  // The caller is blocked by communication; it is not again.
  void caller_blocks(int64_t now) { blocked_since_ = now; }
  void caller_goes_on(int64_t now);
  bool caller_is_blocked() const { return blocked_since_ != 0; }

  // A lane begins, or ends, to run a bucket.
  void lane_begins(int64_t now);
  void lane_ends(int64_t now);

  // Time for which the caller has been blocked until `now`.
  int64_t exposed_ns(int64_t now) const;
  int64_t exposed_ns() const { return exposed_ns_; }
  int64_t longest_wait_ns() const { return longest_wait_ns_; }  // of the caller, at a stretch
  int64_t busy_ns() const { return busy_ns_; }                  // at least one lane was running
  int64_t hidden_ns() const { return hidden_ns_; }  // of that, while the caller was not blocked

 private:
  int64_t exposed_ns_ = 0;
  int64_t longest_wait_ns_ = 0;
  int64_t busy_ns_ = 0;
  int64_t hidden_ns_ = 0;
  int64_t blocked_since_ = 0;  // 0: not blocked
  int running_ = 0;            // lanes
  int64_t running_since_ = 0;
  int64_t exposed_before_ = 0;  // when the first of the running lanes began
};

// From the beginning of a bucket's ops to their end.
class BucketAccount {
 public:
  // Under the engine's mutex, on the lane that owns `communicators`; they outlive the account.
  BucketAccount(const CountingCommunicators& communicators, OverlapClock& clock);
  // Under the mutex, after the ops; `ready_ns`: when the bucket's last slot was marked. `finite`:
  // the result, as run_ops() returns it.
  void close(OverlapClock& clock, int64_t ready_ns, std::optional<bool> finite,
             BucketStats& stats) const;

 private:
  Traffic traffic() const;

  const CountingCommunicators& communicators_;
  const int64_t start_ns_;
  const int64_t exposed_before_;
  const Traffic before_;
};

}  // namespace bagua
