#include "op/tensors/all_finite.h"

#include <cmath>

#include <ATen/ops/isfinite.h>
#include <ATen/ops/sum.h>
#include <ATen/ops/view_as_real.h>

#include "math/finite.h"
#include "op/tensors/arithmetic_dtype.h"

namespace bagua {

bool all_finite(const at::Tensor& tensor) {
  if (tensor.is_complex()) return all_finite(at::view_as_real(tensor));
  if (!at::isFloatingType(tensor.scalar_type())) return true;
  if (tensor.is_cpu() && tensor.is_contiguous()) {
    const void* values = tensor.const_data_ptr();
    switch (tensor.scalar_type()) {
      case at::kFloat:
        return all_finite(values, DType::kFloat32, tensor.numel());
      case at::kHalf:
        return all_finite(values, DType::kFloat16, tensor.numel());
      case at::kBFloat16:
        return all_finite(values, DType::kBFloat16, tensor.numel());
      case at::kDouble:
        return all_finite(static_cast<const double*>(values), tensor.numel());
      default:
        break;
    }
  }
  // A sum is one kernel, and finite unless an element is not or the sum overflows.
  const double sum = at::sum(tensor, arithmetic_dtype(tensor.scalar_type())).item<double>();
  return std::isfinite(sum) || at::isfinite(tensor).all().item<bool>();
}

}  // namespace bagua
