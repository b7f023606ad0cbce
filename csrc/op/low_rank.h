// Approximates the mean of matrices by power iteration, with error feedback.
#pragma once

#include <memory>
#include <optional>
#include <vector>

#include "comm/communicator.h"
#include "ledger/round_memory.h"
#include "ledger/scratch.h"
#include "math/low_rank_kernels.h"
#include "op/contract/bucket_op.h"
#include "op/tensors/low_rank_layout.h"

namespace bagua {

struct LowRankOptions {
  bool warm_start;      // start from the last round's Q instead of a fresh random one
  bool error_feedback;  // add to the next round what this one loses
  uint64_t seed;        // of the random Q; equal on all ranks
  // For buckets on a device. Null: those of CUDA, and where the build has none, ATen's operations.
  std::shared_ptr<const LowRankKernels> kernels = nullptr;
};

// PowerSGD (Vogels et al., NeurIPS 2019, Algorithms 1 and 2), for all matrices of a bucket at once.
// With s the round's grad_scale, per matrix G of the bucket, its residual E and query Q:
//   1. M = G / s + E;  P = M Q;
//   2. one all_reduce (sum) of all P, and of the non-matrix elements, divided by s;
//   3. the columns of P are made orthonormal (low_rank_products.h); Q' = M^T P;
//   4. one all_reduce (sum) of all Q', divided by the number of ranks;
//   5. G <- s P Q'^T in the bucket's dtype;  E <- M - G / s;  Q <- Q', except for columns where P
//      vanished: they keep their old query, or a gradient that was zero once would make them zero
//      for ever. Non-matrix elements become their mean.
// Arithmetic, messages and memory are f32 (f64 for f64 buckets). On a device a kernel does a step
// for all matrices at once (math/low_rank_kernels.h).
//
// A bucket that is not finite on some rank, or whose result overflows its dtype, is seen by all
// ranks alike: it becomes NaN, or is left with its infinities, and memory stays unchanged
// (Note [Memory commits with the round]).
//
// After a round all ranks hold the same bits of the bucket and of Q; residuals E differ.
// The update depends on the residuals only through their mean over the ranks, so any residuals of
// equal mean may replace them (a changed number of ranks). With one rank the residual is added once
// and cleared.
//
// Ownership: the memory is shared with the algorithm. Its tensors are: E, as long as the bucket
// (empty without error feedback); all Q, one after the other, each rank x columns; and the number
// of communications so far, one int64 on the CPU, 0 where no Q is known yet.
// May fail: std::invalid_argument for what does not fit. Bytes sent per rank: as two all_reduces,
// of sum(rank * rows) + the rest, and of sum(rank * columns).
class LowRank final : public BucketOp {
 public:
  // `numel`: elements of the bucket.
  LowRank(std::shared_ptr<Communicator> communicator, std::shared_ptr<Scratch> scratch,
          int64_t numel, const std::vector<LowRankMatrix>& matrices, LowRankOptions options,
          std::shared_ptr<RoundMemory> memory);
  void run(at::Tensor& flat, const Round& round) override;
  std::string describe() const override;

 private:
  struct Job;
  enum Memory { kError, kQueries, kCommunications };

  void run_alone(at::Tensor& flat, const Round& round);
  void check(const at::Tensor& flat, const Round& round);
  at::Tensor queries(const at::Tensor& flat, const Round& round);
  void run_with_kernels(const Job& job, const Round& round);
  void count_communication();
  Finite reduce_left(const Job& job);
  std::vector<at::Tensor> orthonormalise_left(const Job& job) const;
  Finite reduce_right(const Job& job);
  void write_result(const Job& job) const;
  Finite finite_result(const Job& job) const;
  void keep_queries(const Job& job, const std::vector<at::Tensor>& vanished);

  std::shared_ptr<Communicator> communicator_;
  std::shared_ptr<Scratch> scratch_;
  LowRankOptions options_;
  std::shared_ptr<RoundMemory> memory_;
  LowRankLayout layout_;
  std::shared_ptr<const LowRankKernels> kernels_;  // null: on the CPU, or without kernels
  std::optional<const LowRankTable> table_;        // for kernels_
  at::Tensor table_on_device_;
};

}  // namespace bagua
