// minmax_uint8: Bagua's MinMaxUInt8, one range per chunk, and the maths that block_uint8 shares.
//
// Steps for a range with smallest value min and largest value max, every one an IEEE float
// operation rounded to nearest even, never contracted:
//   1. scale = 255 / ((max - min) + 1e-7)
//   2. upper = rint(max * scale),  lower = upper - 255
//   3. code  = rint(value * scale) - lower, at least 0
//   4. value' = (code + lower) / scale
// Decoded values are whole multiples of 1/scale, so zero is exact whenever min <= 0 <= max.
//
// Differences from Bagua, none in the bytes of a range that Bagua encodes well: step 3 clamps from
// below (Bagua's conversion relies on the GPU's), and decode guards the ranges of
// Note [Non-finite values] and those too narrow for step 2.
#pragma once

#include <cstdint>

#include "base/dtype.h"
#include "base/host_device.h"
#include "base/intrinsics.h"

namespace bagua {

struct MinmaxUint8 {
  static constexpr int64_t kBlockNumel = 0;
};

// The smallest and the largest value of a range, as stored in the header; NaN and NaN if any
// value of the range is not finite.
struct ValueRange {
  float min;
  float max;
};

// The grid on which a range is quantised.
struct QuantisationGrid {
  float scale;
  float lower;
  // All values decode to `lower`; codes are zero.
  bool constant;
};

// From here on neighbouring whole numbers cannot all be told apart in float, with 256 in reserve
// for `lower`.
constexpr float kLevelLimit = 16777216.0f - 256.0f;

BAGUA_HD QuantisationGrid quantisation_grid(ValueRange range) {
  const float width = (range.max - range.min) + 1e-7f;
  const bool fits = width <= kLargestFinite<float>;
  const float half_width = range.max * 0.5f - range.min * 0.5f;
  const float scale = fits ? 255.0f / width : 127.5f / half_width;
  const float top = range.max * scale;
  // A range that is narrow for its distance from zero decodes to its middle. The comparison is
  // false for NaN too, and NaN's middle is NaN.
  if (!(top < kLevelLimit && top > -kLevelLimit)) {
    return {1.0f, range.min + (range.max - range.min) * 0.5f, true};
  }
  return {scale, __builtin_rintf(top) - 255.0f, false};
}

// `value` lies in the range, so that the code cannot exceed 255.
BAGUA_HD uint8_t quantise(float value, QuantisationGrid grid) {
  const float level = value * grid.scale;
  const float bounded = greater(grid.lower, level);
  const int32_t whole = nearest_int32(bounded);
  return static_cast<uint8_t>(whole - static_cast<int32_t>(grid.lower));
}

// Rounds to T; stays finite in T if the range is finite.
template <typename T>
BAGUA_HD T dequantise(uint8_t code, QuantisationGrid grid) {
  constexpr float kLargest = kLargestFinite<T>;
  const float value = (static_cast<float>(static_cast<int32_t>(code)) + grid.lower) / grid.scale;
  // Written so that NaN passes.
  const float below = kLargest < value ? kLargest : value;
  return narrow<T>(below < -kLargest ? -kLargest : below);
}

}  // namespace bagua
