// Lanes and warps of a CTA.
#pragma once

#include "base/device.h"

namespace bagua {

constexpr int kWarpLanes = 32;
constexpr unsigned kAllLanes = 0xffffffff;

BAGUA_DEVICE int lane_index() { return static_cast<int>(threadIdx.x) % kWarpLanes; }
BAGUA_DEVICE int warp_index() { return static_cast<int>(threadIdx.x) / kWarpLanes; }

}  // namespace bagua
