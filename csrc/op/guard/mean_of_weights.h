// The exact mean of weights, in place of one that is gossiped.
#pragma once

#include <memory>
#include <string>
#include <vector>

#include "comm/communicator.h"
#include "op/contract/bucket_op.h"

namespace bagua {

// Steps:
//   1. x <- share * x, where members stand for different numbers of ranks;
//   2. all_reduce: x <- the mean over the members;
//   3. every replica <- x, which all members hold; replicas keep their values where x is not
//      finite (as in Note [Replicas stay finite]).
// Ownership: replicas are shared with the op that this one stands in for. Bytes sent per rank: 2 S
// (P - 1) / P for S bytes and P members.
class MeanOfWeights final : public BucketOp {
 public:
  // `share`: members times this member's part of all ranks; 1 among equals. `replicas`: f32, as
  // long as the bucket; may be none.
  MeanOfWeights(std::shared_ptr<Communicator> communicator, double share,
                std::vector<at::Tensor> replicas);
  void run(at::Tensor& flat, const Round& round) override;
  std::string describe() const override;

 private:
  std::shared_ptr<Communicator> communicator_;
  double share_;
  std::vector<at::Tensor> replicas_;
};

}  // namespace bagua
