// Turns gradients into momenta in place, before another op averages them.
#pragma once

#include <memory>
#include <vector>

#include "ledger/scratch.h"
#include "op/contract/bucket_op.h"

namespace bagua {

// The momentum of one slot in the optimizer's state, and the slot's place in the bucket.
struct SlotMomentum {
  at::Tensor memory;             // the slot's sizes, any strides; the bucket's dtype and device
  int64_t offset;                // elements from the start of the bucket
  std::vector<int64_t> strides;  // of the slot in the bucket
};

// Steps, per slot, with its gradient g, its memory m, its beta and the round's grad_scale s, which
// g carries:
//   1. the bucket <- s m + (1 - beta) (g - s m), that is beta s m + (1 - beta) g.
// Memory stays in unscaled units and is only read: the optimizer commits the averaged result
// after a check that it is finite on all ranks. With s = 1 these are the bits of
// torch.optim.Adam's first moment; another power of two scales them and nothing else. Padding stays
// zero. Non-finite values give non-finite results. On a device each of the two
// launches takes all slots.
//
// Ownership: memories and `betas` (one f64 per slot, CPU) are shared with the algorithm; on other
// threads they may be written between wait() and the next mark.
// May fail: std::invalid_argument for tensors that do not fit. Bytes sent: none.
class UpdateMomentum final : public BucketOp {
 public:
  UpdateMomentum(std::vector<SlotMomentum> slots, at::Tensor betas,
                 std::shared_ptr<Scratch> scratch);
  void run(at::Tensor& flat, const Round& round) override;
  std::string describe() const override;

 private:
  void update_in_turn(std::vector<at::Tensor>& gradients, const Round& round) const;
  void update_together(std::vector<at::Tensor>& gradients, const Round& round) const;

  std::vector<SlotMomentum> slots_;
  at::Tensor betas_;
  std::shared_ptr<Scratch> scratch_;
};

}  // namespace bagua
