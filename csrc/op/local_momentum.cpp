#include "op/local_momentum.h"

#include <algorithm>
#include <utility>

#include <ATen/ScalarOps.h>
#include <ATen/ops/lerp.h>
#include <ATen/ops/mul.h>

#include "base/check.h"
#include "op/tensors/slot_betas.h"

namespace bagua {

LocalMomentum::LocalMomentum(std::vector<int64_t> offsets, at::Tensor betas,
                             std::shared_ptr<RoundMemory> memory)
    : offsets_(std::move(offsets)), betas_(std::move(betas)), memory_(std::move(memory)) {
  BAGUA_CHECK_ARG(memory_, "LocalMomentum needs a memory.");
  BAGUA_CHECK_ARG(!offsets_.empty() && std::is_sorted(offsets_.begin(), offsets_.end()) &&
                      offsets_.front() >= 0,
                  "LocalMomentum needs the offset of at least one slot, in ascending order.");
  check_betas(betas_, offsets_.size(), "LocalMomentum");
}

void LocalMomentum::run(at::Tensor& flat, const Round& round) {
  const at::Tensor& before = memory_->value(0);
  at::Tensor& after = memory_->next(0);
  BAGUA_CHECK_ARG(before.sizes() == flat.sizes() && before.scalar_type() == flat.scalar_type() &&
                      before.device() == flat.device() && offsets_.back() <= flat.numel(),
                  "bucket '", round.bucket, "': the momentum (", before.toString(), before.sizes(),
                  ") must be like the bucket (", flat.toString(), ", ", flat.numel(),
                  " elements).");
  if (round.grad_scale != 1.0f) flat.div_(round.grad_scale);
  // 1. Slots of one beta together; what lies before a slot's end and the next one is padding.
  const double* betas = betas_.const_data_ptr<double>();
  int64_t begin = 0;
  for (size_t i = 0; i < offsets_.size(); ++i) {
    const bool last = i + 1 == offsets_.size();
    if (!last && betas[i + 1] == betas[i]) continue;
    const int64_t numel = (last ? flat.numel() : offsets_[i + 1]) - begin;
    at::Tensor out = after.narrow(0, begin, numel);
    at::lerp_out(out, before.narrow(0, begin, numel), flat.narrow(0, begin, numel), 1.0 - betas[i]);
    begin += numel;
  }
  // 2.
  if (round.grad_scale == 1.0f) {
    flat.copy_(after);
  } else {
    at::mul_out(flat, after, at::native::wrapped_scalar_tensor(round.grad_scale));
  }
  memory_->leave(round.number, Finite{});
}

std::string LocalMomentum::describe() const {
  return concat("LocalMomentum(", offsets_.size(), " slots)");
}

}  // namespace bagua
