// The kernel of fill_if_set.
#pragma once

#include <cstddef>
#include <cstdint>

#include "base/device.h"

namespace bagua {

constexpr int kFillThreads = 512;
// Few, since all that they do in a healthy run is one read across the bus each.
constexpr int64_t kMaxFillCtas = 32;

__global__ void __launch_bounds__(kFillThreads)
    fill_bytes_if_set(const volatile uint32_t* flag, std::byte* data, int64_t bytes) {
  __shared__ uint32_t is_set;
  if (threadIdx.x == 0) is_set = *flag;
  __syncthreads();
  if (is_set == 0) return;
  const int64_t step = static_cast<int64_t>(gridDim.x) * blockDim.x;
  for (int64_t i = static_cast<int64_t>(blockIdx.x) * blockDim.x + threadIdx.x; i < bytes;
       i += step) {
    data[i] = std::byte{0xff};
  }
}

// CTAs for that many bytes.
inline int64_t fill_grid(int64_t bytes) {
  const int64_t enough = (bytes + kFillThreads - 1) / kFillThreads;
  return enough < kMaxFillCtas ? enough : kMaxFillCtas;
}

}  // namespace bagua
