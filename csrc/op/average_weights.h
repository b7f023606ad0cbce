// The mean of the ranks' weights, next to the weights.
#pragma once

#include <memory>

#include "op/contract/bucket_op.h"

namespace bagua {

// Weights are read by forward and backward while they travel, so the bucket is left alone:
//   1. copy the bucket into `peer_weight`;
//   2. run the inner op, which averages in place, on `peer_weight`;
//   3. add one to `communications`.
// The caller that waits for the bucket copies `peer_weight` back, before the optimizer's step.
//
// Ownership: both tensors are shared with the algorithm, which saves the counter; on other threads
// they may be read between wait() and the next mark. `communications` is one int64 in CPU memory
// and counts on every rank, also where a node's leader alone runs what is inside Hierarchical.
// May fail: std::invalid_argument for tensors that do not fit; what the inner op throws, and then
// nothing is counted. Bytes sent: the inner op's.
class AverageWeights final : public BucketOp {
 public:
  AverageWeights(at::Tensor peer_weight, at::Tensor communications,
                 std::shared_ptr<BucketOp> inner);
  void run(at::Tensor& flat, const Round& round) override;
  std::string describe() const override;

 private:
  at::Tensor peer_weight_;
  at::Tensor communications_;
  std::shared_ptr<BucketOp> inner_;
};

}  // namespace bagua
