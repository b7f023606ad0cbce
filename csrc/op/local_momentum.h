// Turns gradients into a momentum that each rank keeps for itself, before another op averages them.
#pragma once

#include <memory>
#include <vector>

#include "op/contract/bucket_op.h"
#include "op/memory/round_memory.h"

namespace bagua {

// Momentum correction (Y. Lin et al., "Deep Gradient Compression", ICLR 2018, section 3.1): what is
// compressed with error feedback is the momentum of this rank's own gradients; what arrives is not
// put back into it. Steps, with the gradients g, which carry the round's grad_scale s, the momentum
// u in the memory, and the beta of the slot that an element belongs to:
//   1. u <- u + (1 - beta) (g / s - u), that is beta u + (1 - beta) g / s;
//   2. the bucket <- s u.
// u counts only if the whole round was finite (note [Memory commits with the round]), which the op
// that averages the bucket reports: it sends what has become of a value that is not. Padding stays
// zero. With s = 1 these are the bits of UpdateMomentum with u for its memory.
//
// Ownership: `betas` (one f64 per slot, CPU) is shared with the algorithm; on other threads it may
// be written between wait() and the next mark. Tensor 0 of the memory is u, as long as the bucket
// and of its dtype and device.
// May fail: std::invalid_argument for tensors that do not fit. Bytes sent: none.
class LocalMomentum final : public BucketOp {
 public:
  // `offsets`: of the first elements of the slots, in ascending order.
  LocalMomentum(std::vector<int64_t> offsets, at::Tensor betas,
                std::shared_ptr<RoundMemory> memory);
  void run(at::Tensor& flat, const Round& round) override;
  std::string describe() const override;

 private:
  std::vector<int64_t> offsets_;
  at::Tensor betas_;
  std::shared_ptr<RoundMemory> memory_;
};

}  // namespace bagua
