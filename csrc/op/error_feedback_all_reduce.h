// Exact all-reduce that first adds the accumulated residual, then clears it.
#pragma once

#include <memory>

#include "comm/communicator.h"
#include "ledger/error_feedback.h"

namespace bagua {

// For buckets whose sparse message would not be smaller, with the memory of the sparse ops: a
// checkpoint of another number of ranks may contain residuals, and the rounds of all buckets
// succeed or fail together.
// Steps, with e as in ledger/error_feedback.h:
//   1. g <- g + s e, where the residual is not zero;
//   2. all_reduce: the mean over all ranks, in the bucket's dtype;
//   3. e <- 0.
// Bytes sent per rank: 2 S (P - 1) / P for S bytes and P ranks.
class ErrorFeedbackAllReduce final : public BucketOp {
 public:
  ErrorFeedbackAllReduce(std::shared_ptr<Communicator> communicator,
                         std::shared_ptr<Scratch> scratch, int64_t numel,
                         std::shared_ptr<RoundMemory> memory);
  void run(at::Tensor& flat, const Round& round) override;
  std::string describe() const override;

 private:
  std::shared_ptr<Communicator> communicator_;
  ErrorFeedback feedback_;
};

}  // namespace bagua
