#include "op/tensors/all_finite.h"

#include <cmath>
#include <limits>

#include <ATen/ops/aminmax.h>
#include <ATen/ops/full.h>
#include <ATen/ops/isfinite.h>
#include <ATen/ops/sum.h>
#include <ATen/ops/view_as_real.h>
#include <ATen/ops/where.h>

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

Finite& Finite::operator&=(const Finite& other) {
  here = here && other.here;
  if (other.there.defined()) there = there.defined() ? there.logical_and(other.there) : other.there;
  return *this;
}

Finite finite_of(const at::Tensor& tensor) {
  if (tensor.is_cpu()) return {.here = all_finite(tensor), .there = {}};
  if (tensor.is_complex()) return finite_of(at::view_as_real(tensor));
  if (!at::isFloatingType(tensor.scalar_type()) || tensor.numel() == 0) return {};
  // One kernel that reads the tensor once; NaN is both its minimum and its maximum. A number that
  // is not finite gives NaN times zero, in fewer launches than isfinite().
  const auto [least, most] = at::aminmax(tensor);
  return {.here = true, .there = least.mul(0).add_(most.mul(0)).eq(0)};
}

at::Tensor finite_everywhere(const at::Tensor& tensor, Communicator& communicator) {
  const double nan = std::numeric_limits<double>::quiet_NaN();
  const Finite finite = finite_of(tensor);
  at::Tensor flag = at::full({1}, finite.here ? 0.0 : nan, tensor.options().dtype(at::kFloat));
  if (finite.there.defined()) flag = at::where(finite.there, flag, nan);
  if (communicator.group().size > 1) communicator.all_reduce(flag, ReduceOp::kSum);
  return flag;
}

}  // namespace bagua
