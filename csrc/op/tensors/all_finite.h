// Whether a tensor holds neither NaN nor infinity.
#pragma once

#include <ATen/core/Tensor.h>

namespace bagua {

// Of any dtype, on any device; elsewhere than on the CPU it waits for the device.
bool all_finite(const at::Tensor& tensor);

}  // namespace bagua
