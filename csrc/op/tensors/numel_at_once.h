// Size of the pieces in which an op goes through a tensor.
#pragma once

#include <cstdint>

#include <ATen/core/Tensor.h>

namespace bagua {

// Elements to be handled at a time: `cached` on CPU, so that they stay in cache from one operation
// to the next; all of them on a device, which would rather have few large launches.
inline int64_t numel_at_once(const at::Tensor& tensor, int64_t cached) {
  return tensor.is_cpu() ? cached : tensor.numel();
}

}  // namespace bagua
