// Views complex numbers as pairs of reals, for transports and sums.
#pragma once

#include <ATen/core/Tensor.h>
#include <ATen/ops/view_as_real.h>

namespace bagua {

// An alias of contiguous memory: twice as many reals where it is complex, else the tensor itself.
// The sum and the mean of complex numbers are those of their parts.
inline at::Tensor reals_of(const at::Tensor& flat) {
  return flat.is_complex() ? at::view_as_real(flat).view({-1}) : flat;
}

}  // namespace bagua
