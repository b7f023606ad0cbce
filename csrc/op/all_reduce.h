// The exact sum or mean of a bucket over all ranks.
#pragma once

#include <memory>

#include "comm/communicator.h"
#include "op/contract/bucket_op.h"

namespace bagua {

// One all_reduce of the flat bucket, complex numbers as pairs of reals. Bytes sent per rank: 2 S (P
// - 1) / P for S bytes and P ranks.
class AllReduce final : public BucketOp {
 public:
  AllReduce(std::shared_ptr<Communicator> communicator, ReduceOp op);
  void run(at::Tensor& flat, const Round& round) override;
  std::string describe() const override;

 private:
  std::shared_ptr<Communicator> communicator_;
  ReduceOp op_;
};

}  // namespace bagua
