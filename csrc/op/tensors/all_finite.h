// Whether a tensor holds neither NaN nor infinity.
#pragma once

#include <ATen/core/Tensor.h>

#include "comm/communicator.h"

namespace bagua {

// `tensor`: of any dtype, on any device; on a device other than the CPU the call waits for it.
bool all_finite(const at::Tensor& tensor);

// The same without waiting.
struct Finite {
  bool here = true;  // false: a tensor in host memory is not finite
  at::Tensor there;  // one bool on a device, for tensors there; undefined: none

  Finite& operator&=(const Finite& other);
};
Finite finite_of(const at::Tensor& tensor);

// One f32 on the device of `tensor`: 0 if that is finite on all ranks, otherwise NaN. One
// all_reduce of 4 bytes, in which all ranks take part.
at::Tensor finite_everywhere(const at::Tensor& tensor, Communicator& communicator);

}  // namespace bagua
