// A communication hook of torch's DistributedDataParallel that hands buckets to a dynamic lane.
#pragma once

#include <atomic>
#include <cstdint>
#include <functional>
#include <memory>
#include <mutex>
#include <string>
#include <vector>

#include <torch/csrc/distributed/c10d/comm.hpp>
#include <torch/csrc/distributed/c10d/reducer.hpp>

#include "engine/jobs.h"
#include "ledger/round_memory.h"

namespace bagua {

// A bucket as torch's DistributedDataParallel hands it over, for what makes its operations.
struct GradientBucket {
  size_t index;
  at::Tensor buffer;                   // the gradients, one after the other
  std::vector<at::Tensor> parameters;  // in the order of their gradients
  std::vector<int64_t> offsets;        // of the gradients, in elements of the buffer
};

// Operations of a bucket from now on, until its contents change.
struct BucketOperations {
  JobPlan plan;
  std::shared_ptr<RoundMemory> memory{};  // of the op that has one
};

struct DdpHookOptions {
  // Called when a bucket comes for the first time, or with other contents than before.
  std::function<BucketOperations(const GradientBucket&, int64_t round)> operations;
  // Called at the first bucket of each round: the factor that the gradients carry. Null: 1.
  std::function<float()> grad_scale{};
  std::shared_ptr<RoundOutcome> outcome{};  // of all memories; null: there are none
  // Blocks until all these futures of the lane are completed, with errors or not; what it throws
  // goes through autograd. Null: torch waits for them.
  std::function<void(const std::shared_ptr<DynamicLane>&, const std::vector<DynamicLane::Future>&)>
      wait{};
};

// Note [Rounds of torch's DistributedDataParallel]
// torch calls the hook on autograd's threads, bucket by bucket in the order of their indices, and
// takes the results of all of them at the end of backward. So a round begins with the first bucket
// after that, whatever its index: buckets whose parameters no rank used may be missing
// (skip_all_reduce_unused_params). A rank that has joined (join()) takes the results by itself: its
// round begins with a bucket whose index is not above the last one's. Graph tasks do not tell
// rounds apart: a reentrant checkpoint has several in one backward. Between two rounds the buckets
// may be made anew, of other parameters (after the first backward, or the second with
// static_graph), so operations are kept by a bucket's contents: parameters, offsets, dtype. Memory
// of a bucket that was missing, or is not used any more, counts as having left the round (Note
// [Memory commits with the round]).
//
// Thread safety: as torch calls it, one bucket at a time; renew(), round() from any thread,
// settle() between rounds. Ownership: shared by torch's Reducer and a handle of the user's.
class DdpHook final {
 public:
  DdpHook(std::shared_ptr<DynamicLane> lane, DdpHookOptions options);

  DynamicLane::Future run(c10d::GradBucket& bucket);

  // This rank's next round is of so many samples more.
  void add_samples(float number);

  // torch takes a result: the bucket that comes next is the first of another round.
  void end_round();

  // Between rounds: memories hold what they are to hold in the next one.
  void settle();

  // From round `round` on the operations of all buckets are made again.
  void renew(int64_t round);

  // The last round that has begun; 0: none has.
  int64_t round() const;

 private:
  struct Known {
    std::vector<const void*> parameters;
    std::vector<int64_t> offsets;
    at::ScalarType dtype;
    int64_t numel;
    std::shared_ptr<const JobPlan> plan;
    std::shared_ptr<RoundMemory> memory;
  };

  void begin_round();
  const Known& known(const GradientBucket& bucket);
  void await_before_torch() const;
  void retire(const std::vector<const void*>& parameters);

  const std::shared_ptr<DynamicLane> lane_;
  const DdpHookOptions options_;
  mutable std::mutex mutex_;
  std::vector<std::unique_ptr<Known>> known_;  // by index; null: has not come yet
  int64_t members_ = 0;                        // memories that were ever made
  int64_t left_ = 0;                           // of them, those that took part in the round
  int64_t round_ = 0;
  int64_t last_index_ = -1;
  std::atomic<bool> ended_{true};
  float grad_scale_ = 1.0f;
  RankSamples next_samples_{}, samples_{};    // of the next round, and of this one
  int64_t renewed_at_ = 0;                    // round; 0: none
  std::vector<DynamicLane::Future> futures_;  // of the round
};

// Makes `hook` the communication hook of `reducer`. Throws if that has one.
void register_hook(c10d::Reducer& reducer, std::shared_ptr<DdpHook> hook);

}  // namespace bagua
