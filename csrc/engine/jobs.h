// A communication thread that learns of its jobs one by one, in call order.
#pragma once

#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include <ATen/core/Tensor.h>
#include <ATen/core/ivalue.h>

#include "base/owner_process.h"
#include "engine/engine.h"
#include "engine/lane.h"
#include "engine/rank_samples.h"
#include "op/contract/bucket_op.h"

namespace bagua {

// Work on a tensor; shared by all jobs that do it.
struct JobPlan {
  std::string name;         // of the bucket, for statistics and error messages
  std::string description;  // equal on all ranks: the ranks' agreement compares it
  std::vector<std::shared_ptr<BucketOp>> ops;
  double scale = 1.0;  // the tensor is multiplied by it before the first op
};

// Where the values of a job are multiplied by this rank's weight: Note [Weights of ranks].
enum class Weighed : uint8_t {
  kHere,    // before the first op
  kBefore,  // they have been by its number of samples, and are not yet by the sum of all
  kNot,     // they are not a contribution of this rank's samples
};

struct Job {
  std::shared_ptr<const JobPlan> plan;
  at::Tensor flat;  // contiguous, one-dimensional; changed in place
  int64_t round;    // from 1, never falling
  float grad_scale = 1.0f;
  RankSamples samples{};
  Weighed weighed = Weighed::kHere;
};

// Where an Engine has all buckets up front, here any tensor may come, with any op. All ranks post
// the same jobs in the same order, which they compare: Note [Agreement on jobs].
//
// Thread safety: post() from one thread at a time; abort(), stop(), check(), stats() from any.
// Ownership: sole owner of the communicators; the thread keeps them, ops and tensors alive
// while a job runs. Ordering: jobs run in the order of post(). On a device they run on a stream of
// the lane's own, after the work that the posting thread's current stream had been given, and a
// future is completed with that stream's event: its wait() orders the waiter's current stream.
// May fail: the first failure of a job, of the agreement, or of another rank (read with each
// heartbeat while jobs are pending) is published and explained (Note [Diagnosis]); all pending
// futures and later calls of post() and check() have it as their error.
class DynamicLane {
 public:
  using Future = c10::intrusive_ptr<c10::ivalue::Future>;

  // `incarnation`: equal on all ranks, and of no other lane.
  DynamicLane(LaneOptions options, uint64_t incarnation);
  ~DynamicLane();
  DynamicLane(const DynamicLane&) = delete;
  DynamicLane& operator=(const DynamicLane&) = delete;

  // The future's value is the job's tensor.
  Future post(Job job);

  // Throws the failure, if there is one.
  void check() const;

  // Ends everything: pending futures and later calls have `reason` as their error, here and,
  // published, on the other ranks.
  void abort(const std::string& reason) noexcept;

  // Blocks until all of these futures are completed, with errors or not.
  void wait(const std::vector<Future>& futures);

  // Ends everything as abort() does, where a transport outside of the lane failed: another rank may
  // be the cause, and is looked for (Note [Diagnosis]). check() then throws what was found.
  void transport_failed(const std::string& reason) noexcept;

  // This rank waits for others outside of the lane, in a collective of torch's that `text` names;
  // empty: not any more.
  void waits_outside(std::string text) noexcept;

  // The factor of this rank's values in the job that was weighed last: Note [Weights of ranks].
  double weight() const noexcept;

  // Stops the thread; pending futures fail. Called by the destructor; idempotent.
  void stop() noexcept;

  // By name of the plans, in the order in which they first ran. The lane does not know when its
  // caller waits: hidden_ns, exposed_ns and longest_wait_ns are 0.
  EngineStats stats() const;

 private:
  struct State;

  OwnersOnly<std::shared_ptr<State>> state_;
};

}  // namespace bagua
