// Host memory for copies from and to a device.
#pragma once

#include <ATen/Context.h>
#include <ATen/core/CachingHostAllocator.h>
#include <ATen/core/Tensor.h>
#include <ATen/ops/empty.h>

#include "comm/device_stream.h"

namespace bagua {

inline bool pins_host_memory(at::Device device) {
  return device.is_cuda() && at::globalContext().hasCUDA();
}

// Pinned where the device is CUDA's: only such copies run in stream order without the thread's
// waiting.
inline at::Tensor host_memory(at::IntArrayRef sizes, at::ScalarType dtype, at::Device device) {
  return at::empty(sizes, at::TensorOptions(dtype).pinned_memory(pins_host_memory(device)));
}

// Keeps `memory`, of host_memory(), from its next owner until the current stream has done what it
// has been given when the last owner lets go of it. copy_() does so by itself, a kernel does not.
inline void used_by_current_stream(const at::Tensor& memory, at::Device device) {
  if (!pins_host_memory(device)) return;
  at::getHostAllocator(device.type())
      ->record_event(memory.data_ptr(), memory.storage().data_ptr().get_context(),
                     current_stream(device));
}

}  // namespace bagua
