#include "op/update_momentum.h"

#include <utility>

#include <ATen/ScalarOps.h>
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
  const double* betas = betas_.const_data_ptr<double>();
  for (size_t i = 0; i < slots_.size(); ++i) {
    const auto& [memory, offset, strides] = slots_[i];
    BAGUA_CHECK_ARG(
        memory.scalar_type() == flat.scalar_type() && memory.device() == flat.device() &&
            !memory.is_alias_of(flat) && offset + memory.numel() <= flat.numel(),
        "bucket '", round.bucket, "': the momentum of its slot ", i, " (", memory.toString(),
        memory.sizes(), " at ", offset, ") must be memory of its own, like the bucket's (",
        flat.toString(), ", ", flat.numel(), " elements).");
    at::Tensor gradient =
        at::as_strided(flat, memory.sizes(), strides, flat.storage_offset() + offset);
    at::Tensor scaled = memory;
    if (round.grad_scale != 1.0f) {
      scaled = at::as_strided(
          scratch_->get(Scratch::kScaled, memory.numel(), flat.scalar_type(), flat.device()),
          memory.sizes(), strides, 0);
      at::mul_out(scaled, memory, at::native::wrapped_scalar_tensor(round.grad_scale));
    }
    // 1.
    at::lerp_out(gradient, scaled, gradient, 1.0 - betas[i]);
  }
}

std::string UpdateMomentum::describe() const {
  return concat("UpdateMomentum(", slots_.size(), " slots)");
}

}  // namespace bagua
