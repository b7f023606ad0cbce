// Sums and places that the kernels of low-rank products share.
#pragma once

#include "base/device.h"
#include "base/warp.cuh"

namespace bagua {

constexpr int kAhead = 4;      // elements that a lane loads before it uses the first
constexpr int kRankBlock = 4;  // vectors of Q or P that one pass over a matrix multiplies with

// The sum over the lanes of the warp, in all of them.
template <typename W>
BAGUA_DEVICE W sum_of_lanes(W value) {
  BAGUA_UNROLL
  for (int distance = kWarpLanes / 2; distance > 0; distance /= 2) {
    value += __shfl_xor_sync(kAllLanes, value, distance);
  }
  return value;
}

template <typename W>
BAGUA_DEVICE bool is_finite_value(W value) {
  return value - value == 0;
}

}  // namespace bagua
