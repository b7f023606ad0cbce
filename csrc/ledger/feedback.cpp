#include "ledger/feedback.h"

#include <ATen/ops/add.h>
#include <ATen/ops/where.h>

namespace bagua {

at::Tensor Feedback::corrected(const at::Tensor& values, float scale) {
  at::Tensor p = kept();
  const at::Tensor& e = residual();
  if (scale == 1.0f && values.scalar_type() == p.scalar_type()) return at::add_out(p, values, e);
  p.copy_(values);
  if (scale != 1.0f) p.div_(scale);
  return p.add_(e);
}

void Feedback::leave(int64_t round, const Finite& finite) {
  constexpr size_t kCommunications = 1;
  const int64_t before = memory_->value(kCommunications).item<int64_t>();
  memory_->next(kCommunications).fill_(before + 1);
  memory_->leave(round, finite);
}

void add_residual(at::Tensor& flat, const at::Tensor& residual, float scale) {
  if (!residual.is_cpu()) {
    flat.add_(at::where(residual.eq(0), -0.0, residual.mul(scale)));
  } else if (residual.any().item<bool>()) {
    flat.add_(residual, scale);
  }
}

}  // namespace bagua
