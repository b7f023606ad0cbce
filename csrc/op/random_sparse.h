// Averages random elements of a bucket, with error feedback.
#pragma once

#include <memory>

#include "comm/communicator.h"
#include "ledger/error_feedback.h"
#include "math/random_order.h"

namespace bagua {

// Random-k sparsification (Stich et al., NeurIPS 2018), without replacement: an epoch is
// ceil(n / k) rounds, each of which sends k of the n elements; the last one sends the remainder.
// The order of an epoch is a RandomOrder of `seed` and its number; the number of communications in
// the memory identifies the round. So all ranks know the elements, and no indices are sent.
// Steps, with m and e as in ledger/error_feedback.h:
//   1. m = g / s + e;
//   2. c = the elements of this round; e <- m - c;
//   3. one all_reduce (sum) of their values and of one more, NaN where m is not finite anywhere;
//   4. g <- sum * s / P, zeros elsewhere; NaN instead of all values if the last one is NaN.
// All ranks hold the same bits afterwards. As the operation is linear, training depends on the
// residuals only through their mean over the ranks.
//
// Bytes sent per rank: as an all_reduce of k + 1 elements of f32 (f64 for f64 buckets).
class RandomSparse final : public BucketOp {
 public:
  // `numel`: elements of the bucket; 1 <= k <= numel (0 if it is empty). `order`: computes the
  // elements of a round on a device; null: the CUDA kernel of this build, or the host, which copies
  // them, where it has none.
  RandomSparse(std::shared_ptr<Communicator> communicator, std::shared_ptr<Scratch> scratch,
               int64_t numel, int64_t k, uint64_t seed, std::shared_ptr<RoundMemory> memory,
               std::shared_ptr<const OrderKernel> order = nullptr);
  void run(at::Tensor& flat, const Round& round) override;
  std::string describe() const override;

 private:
  at::Tensor elements_of_round(at::Device device) const;

  std::shared_ptr<Communicator> communicator_;
  std::shared_ptr<Scratch> scratch_;
  int64_t k_;
  uint64_t seed_;
  ErrorFeedback feedback_;
  std::shared_ptr<const OrderKernel> order_;
};

}  // namespace bagua
