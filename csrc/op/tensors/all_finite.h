// Whether a tensor holds neither NaN nor infinity.
#pragma once

#include <ATen/core/Tensor.h>

namespace bagua {

// `tensor`: of any dtype, on any device; on a device other than the CPU the call waits for it.
bool all_finite(const at::Tensor& tensor);

}  // namespace bagua
