// An exact op in place of one that keeps residuals: they are sent, and become zero.
#pragma once

#include <memory>
#include <optional>
#include <string>

#include "op/contract/bucket_op.h"
#include "op/memory/round_memory.h"

namespace bagua {

// The residual of this rank's part of the bucket, in units of the mean: tensor `index` of the
// memory, from element `first` of the bucket on. `ranks` have such parts.
struct PartResidual {
  size_t index;
  int64_t first;
  int ranks;
};

// Steps, with s the round's grad_scale, g the bucket, e tensor 0 of the memory and q the residual
// of the part, if there is one:
//   1. g <- g + s e, and in the part g <- g + s P q for P ranks;
//   2. the exact op averages or sums g;
//   3. e <- 0, q <- 0; the other tensors of the memory (queries, counters) stay.
// A result that is not finite leaves the memory as it was (Note [Memory commits with the round]).
// Ownership: the memory is shared with the op that this one stands in for. Bytes sent: the exact
// op's.
class SettleResiduals final : public BucketOp {
 public:
  SettleResiduals(std::shared_ptr<BucketOp> exact, std::shared_ptr<RoundMemory> memory,
                  std::optional<PartResidual> part = std::nullopt);
  void run(at::Tensor& flat, const Round& round) override;
  std::string describe() const override;

 private:
  static constexpr size_t kResidual = 0;

  std::shared_ptr<BucketOp> exact_;
  std::shared_ptr<RoundMemory> memory_;
  std::optional<PartResidual> part_;
};

}  // namespace bagua
