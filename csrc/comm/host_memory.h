// Host memory for copies from and to a device.
#pragma once

#include <ATen/Context.h>
#include <ATen/core/Tensor.h>
#include <ATen/ops/empty.h>

namespace bagua {

// Pinned where the device is CUDA's: only such copies run in stream order without the thread's
// waiting.
inline at::Tensor host_memory(at::IntArrayRef sizes, at::ScalarType dtype, at::Device device) {
  const bool pinned = device.is_cuda() && at::globalContext().hasCUDA();
  return at::empty(sizes, at::TensorOptions(dtype).pinned_memory(pinned));
}

}  // namespace bagua
