// Averages the ranks' weights in memory beside them.
#pragma once

#include <memory>

#include "op/contract/bucket_op.h"

namespace bagua {

// Forward and backward read the weights during the communication, so the bucket is not changed:
//   1. copy the bucket into `peer_weight`;
//   2. run the inner op, which averages in place, on `peer_weight`;
//   3. add one to `communications`.
// The caller that waits for the bucket copies `peer_weight` back, before the optimizer's step.
//
// Ownership: both tensors are shared with the algorithm, which saves the counter; on other threads
// they may be read between wait() and the next mark. `communications` is one int64 in CPU memory
// and counts on every rank, also where only a node's leader runs the inner op of Hierarchical.
// May fail: std::invalid_argument for tensors that do not fit; exceptions of the inner op, which
// are not counted. Bytes sent: the inner op's.
class AverageWeights final : public BucketOp {
 public:
  AverageWeights(at::Tensor peer_weight, at::Tensor communications,
                 std::shared_ptr<BucketOp> inner);
  void run(at::Tensor& flat, const Round& round) override;
  at::Tensor result(const at::Tensor&) const override { return peer_weight_; }
  std::string describe() const override;

 private:
  at::Tensor peer_weight_;
  at::Tensor communications_;
  std::shared_ptr<BucketOp> inner_;
};

}  // namespace bagua
