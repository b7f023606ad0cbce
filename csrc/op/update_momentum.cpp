#include "op/update_momentum.h"

#include <utility>

#include <ATen/ScalarOps.h>
#include <ATen/ops/_foreach_copy.h>
#include <ATen/ops/_foreach_lerp.h>
#include <ATen/ops/_foreach_mul.h>
#include <ATen/ops/as_strided.h>
#include <ATen/ops/lerp.h>
#include <ATen/ops/mul.h>

#include "base/check.h"

namespace bagua {

UpdateMomentum::UpdateMomentum(std::vector<SlotMomentum> slots, at::Tensor betas,
                               std::shared_ptr<Scratch> scratch)
    : slots_(std::move(slots)), betas_(std::move(betas)), scratch_(std::move(scratch)) {
  BAGUA_CHECK_ARG(!slots_.empty(), "UpdateMomentum needs the memory of at least one slot.");
  BAGUA_CHECK_ARG(betas_.defined() && betas_.is_cpu() && betas_.scalar_type() == at::kDouble &&
                      betas_.dim() == 1 && betas_.is_contiguous() &&
                      betas_.numel() == static_cast<int64_t>(slots_.size()),
                  "UpdateMomentum: betas must be ", slots_.size(),
                  " contiguous float64 in CPU memory, one per slot.");
  for (const SlotMomentum& slot : slots_) {
    BAGUA_CHECK_ARG(slot.memory.defined() && !slot.memory.requires_grad() &&
                        slot.strides.size() == static_cast<size_t>(slot.memory.dim()),
                    "UpdateMomentum: a memory must be a tensor without autograd, of as many "
                    "dimensions as its slot has strides.");
  }
}

void UpdateMomentum::run(at::Tensor& flat, const Round& round) {
  std::vector<at::Tensor> gradients;
  for (size_t i = 0; i < slots_.size(); ++i) {
    const auto& [memory, offset, strides] = slots_[i];
    BAGUA_CHECK_ARG(
        memory.scalar_type() == flat.scalar_type() && memory.device() == flat.device() &&
            !memory.is_alias_of(flat) && offset + memory.numel() <= flat.numel(),
        "bucket '", round.bucket, "': the momentum of its slot ", i, " (", memory.toString(),
        memory.sizes(), " at ", offset, ") must be separate memory, like the bucket's (",
        flat.toString(), ", ", flat.numel(), " elements).");
    gradients.push_back(
        at::as_strided(flat, memory.sizes(), strides, flat.storage_offset() + offset));
  }
  if (flat.is_cpu()) {
    update_in_turn(gradients, round);
  } else {
    update_together(gradients, round);
  }
}

// Slot by slot, so that a slot stays in cache.
void UpdateMomentum::update_in_turn(std::vector<at::Tensor>& gradients, const Round& round) const {
  const double* betas = betas_.const_data_ptr<double>();
  for (size_t i = 0; i < slots_.size(); ++i) {
    const auto& [memory, offset, strides] = slots_[i];
    at::Tensor scaled = memory;
    if (round.grad_scale != 1.0f) {
      scaled = at::as_strided(
          scratch_->get(Scratch::kScaled, memory.numel(), memory.scalar_type(), memory.device()),
          memory.sizes(), strides, 0);
      at::mul_out(scaled, memory, at::native::wrapped_scalar_tensor(round.grad_scale));
    }
    // 1.
    at::lerp_out(gradients[i], scaled, gradients[i], 1.0 - betas[i]);
  }
}

// All slots in each launch.
void UpdateMomentum::update_together(std::vector<at::Tensor>& gradients, const Round& round) const {
  const double* betas = betas_.const_data_ptr<double>();
  std::vector<at::Tensor> scaled;
  std::vector<at::Scalar> weights;
  for (size_t i = 0; i < slots_.size(); ++i) {
    scaled.push_back(slots_[i].memory);
    weights.emplace_back(1.0 - betas[i]);
  }
  if (round.grad_scale != 1.0f) scaled = at::_foreach_mul(scaled, at::Scalar(round.grad_scale));
  // 1.
  at::_foreach_copy_(gradients, at::_foreach_lerp(scaled, gradients, weights));
}

std::string UpdateMomentum::describe() const {
  return concat("UpdateMomentum(", slots_.size(), " slots)");
}

}  // namespace bagua
