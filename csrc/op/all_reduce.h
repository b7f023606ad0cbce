// The exact sum or mean of a bucket over all ranks.
#pragma once

#include <memory>

#include "comm/communicator.h"
#include "op/contract/bucket_op.h"

namespace bagua {

// One all_reduce of the flat bucket, complex numbers as pairs of reals. Bytes sent per rank: 2 S (P
// - 1) / P for S bytes and P ranks. Ranks that can read each other's bucket where it lies copy
// nothing into other memory.
class AllReduce final : public BucketOp {
 public:
  AllReduce(std::shared_ptr<Communicator> communicator, ReduceOp op);

  // For this bucket only, and constructed by all ranks; see Communicator::share().
  AllReduce(std::shared_ptr<Communicator> communicator, ReduceOp op, const at::Tensor& flat);

  void run(at::Tensor& flat, const Round& round) override;
  std::string describe() const override;

 private:
  std::shared_ptr<Communicator> communicator_;
  ReduceOp op_;
  std::shared_ptr<SharedBucket> shared_ = nullptr;
  at::Tensor flat_ = {};  // that is shared
};

}  // namespace bagua
