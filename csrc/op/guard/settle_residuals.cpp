#include "op/guard/settle_residuals.h"

#include <utility>

#include "base/check.h"
#include "op/memory/feedback.h"
#include "op/tensors/all_finite.h"

namespace bagua {

SettleResiduals::SettleResiduals(std::shared_ptr<BucketOp> exact,
                                 std::shared_ptr<RoundMemory> memory,
                                 std::optional<PartResidual> part)
    : exact_(std::move(exact)), memory_(std::move(memory)), part_(part) {
  BAGUA_CHECK_ARG(exact_ && memory_ && memory_->size() > kResidual,
                  "SettleResiduals needs an operation, and a memory with a residual.");
  BAGUA_CHECK_ARG(!part_ || (part_->index < memory_->size() && part_->ranks > 0),
                  "SettleResiduals: the residual of the part must be a tensor of the memory.");
}

void SettleResiduals::run(at::Tensor& flat, const Round& round) {
  // 1.
  if (const at::Tensor& residual = memory_->value(kResidual); residual.numel() > 0) {
    BAGUA_CHECK_ARG(residual.numel() == flat.numel(), "bucket '", round.bucket, "' (", flat.numel(),
                    " elements) does not fit its residual (", residual.numel(), ").");
    add_owed(flat, residual, round.grad_scale);
  }
  if (part_) {
    const at::Tensor& residual = memory_->value(part_->index);
    at::Tensor own = flat.narrow(0, part_->first, residual.numel());
    add_owed(own, residual, round.grad_scale * static_cast<float>(part_->ranks));
  }
  // 2.
  exact_->run(flat, round);
  // 3.
  for (size_t i = 0; i < memory_->size(); ++i) {
    if (i == kResidual || (part_ && i == part_->index)) {
      memory_->next(i).zero_();
    } else {
      memory_->next(i).copy_(memory_->value(i));
    }
  }
  memory_->leave(round.number, finite_of(flat));
}

std::string SettleResiduals::describe() const {
  return concat("SettleResiduals(", exact_->describe(), ")");
}

}  // namespace bagua
