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

// From here on neighbouring whole numbers are not all distinct in float, with 256 in reserve
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

// The range of values while they are met, in any order. Comparisons skip NaN, hence the marks.
template <int kLanes>
struct ValueExtent {
  float low[kLanes];
  float high[kLanes];
  uint32_t marks[kLanes];

  BAGUA_HD void start(int lane) {
    low[lane] = kLargestFinite<float>;
    high[lane] = -kLargestFinite<float>;
    marks[lane] = 0;
  }
  BAGUA_HD void take(int lane, float value) {
    low[lane] = lesser(value, low[lane]);
    high[lane] = greater(value, high[lane]);
    marks[lane] |= non_finite_mark(value);
  }
  template <int kOthers>
  BAGUA_HD void join(int lane, const ValueExtent<kOthers>& other, int from) {
    low[lane] = lesser(other.low[from], low[lane]);
    high[lane] = greater(other.high[from], high[lane]);
    marks[lane] |= other.marks[from];
  }
};

// The range of all values met: Note [Non-finite values]. Which of two zeros a reduction ends with
// depends on its order; adding zero makes both +0.
BAGUA_HD ValueRange finished_range(const ValueExtent<1>& extent) {
  if (is_marked(extent.marks[0])) {
    const float nan = bits_to_float(kFloatQuietNanBits);
    return {nan, nan};
  }
  return {extent.low[0] + 0.0f, extent.high[0] + 0.0f};
}

// The maths of 8 bits and one range, for ranges of any size.
struct RangeUint8 {
  static constexpr int kBits = 8;
  static constexpr int kLanes = 32;

  template <int kCount>
  using Extent = ValueExtent<kCount>;
  using Grid = QuantisationGrid;
  template <typename T>
  struct Header {
    T min;
    T max;
  };

  template <typename T>
  BAGUA_HD static Header<T> header(const Extent<1>& extent) {
    const ValueRange range = finished_range(extent);
    return {narrow<T>(range.min), narrow<T>(range.max)};
  }

  template <typename T>
  BAGUA_HD static Grid grid(Header<T> header) {
    return quantisation_grid({widen(header.min), widen(header.max)});
  }

  // `value` lies in the range, so that the code cannot exceed 255.
  BAGUA_HD static uint8_t quantise(float value, Grid grid) {
    const float level = value * grid.scale;
    const float bounded = greater(grid.lower, level);
    const int32_t whole = nearest_int32(bounded);
    return static_cast<uint8_t>(whole - static_cast<int32_t>(grid.lower));
  }

  // Rounds to T; stays finite in T if the range is finite.
  template <typename T>
  BAGUA_HD static T dequantise(uint8_t code, Grid grid) {
    return narrow_finite<T>((static_cast<float>(static_cast<int32_t>(code)) + grid.lower) /
                            grid.scale);
  }
};

struct MinmaxUint8 : RangeUint8 {
  static constexpr int64_t kBlockNumel = 0;
};

}  // namespace bagua
