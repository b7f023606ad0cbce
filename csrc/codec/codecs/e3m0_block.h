// e3m0_block: 4 bits per element, its sign and one of seven powers of two or zero, and the largest
// exponent per block.
//
// All steps are of integers. With bits(value) those of |value| as a float:
//   1. exponent = (largest of bits(value) + 2^22) >> 23, at most 254: rounded to the nearest power
//      of two, from 1.5 times one on to the next. Below 8, which is 2^-119, the block is zero: the
//      exponent is stored as 0, the codes are 0
//   2. level = ((bits(value) + 2^22) >> 23) - (exponent - 7), from 0 to 7; code = 8 * sign + level
//   3. value' = 2^(level + exponent - 7 - 127) with the sign; zero for level 0
// The 4-bit float of Streaming DiLoCo (Douillard et al., 2025) is this with one scale per message.
#pragma once

#include <cstdint>

#include "base/dtype.h"
#include "base/host_device.h"
#include "codec/codecs/magnitudes.h"

namespace bagua {

struct E3m0Block {
  static constexpr int kBits = 4;
  static constexpr int64_t kBlockNumel = 256;
  static constexpr int kLanes = 32;

  template <int kCount>
  struct Extent {
    int32_t largest[kCount];

    BAGUA_HD void start(int lane) { largest[lane] = 0; }
    BAGUA_HD void take(int lane, float value) { raise(lane, magnitude_bits(value)); }
    template <int kOthers>
    BAGUA_HD void join(int lane, const Extent<kOthers>& other, int from) {
      raise(lane, other.largest[from]);
    }

   private:
    BAGUA_HD void raise(int lane, int32_t bits) {
      largest[lane] = bits > largest[lane] ? bits : largest[lane];
    }
  };

  template <typename T>
  struct Header {
    uint16_t exponent;
  };

  template <typename T>
  BAGUA_HD static Header<T> header(const Extent<1>& extent) {
    if (extent.largest[0] >= static_cast<int32_t>(kFloatInfinityBits)) return {kNotFinite};
    const int32_t exponent = nearest_exponent(extent.largest[0]);
    if (exponent < kSmallestExponent) return {0};
    return {static_cast<uint16_t>(exponent > kLargestExponent ? kLargestExponent : exponent)};
  }

  struct Grid {
    int32_t below;  // the exponent of level 0, if that were none
    uint32_t nan;   // bits of a quiet NaN, or 0
    bool constant;
  };

  template <typename T>
  BAGUA_HD static Grid grid(Header<T> header) {
    const int32_t exponent = header.exponent;
    const bool finite = exponent <= kLargestExponent;
    const bool zero = exponent < kSmallestExponent;
    return {zero || !finite ? 0 : exponent - kLevels, finite ? 0 : kFloatQuietNanBits,
            zero || !finite};
  }

  BAGUA_HD static uint8_t quantise(float value, Grid grid) {
    const int32_t level = nearest_exponent(magnitude_bits(value)) - grid.below;
    const int32_t bounded = level < 0 ? 0 : level > kLevels ? kLevels : level;
    return static_cast<uint8_t>((float_to_bits(value) >> 31) * 8 + static_cast<uint32_t>(bounded));
  }

  // Rounds to T; stays finite in T if the header does not say otherwise.
  template <typename T>
  BAGUA_HD static T dequantise(uint8_t code, Grid grid) {
    const int32_t level = code & kLevels;
    const uint32_t power = static_cast<uint32_t>(level + grid.below) << 23;
    const uint32_t magnitude = (level == 0 || grid.below == 0 ? 0 : power) | grid.nan;
    return narrow_finite<T>(bits_to_float(magnitude | uint32_t{code} >> 3 << 31));
  }

 private:
  static constexpr int32_t kLevels = 7;
  static constexpr int32_t kSmallestExponent = 8;
  static constexpr int32_t kLargestExponent = 254;
  static constexpr uint16_t kNotFinite = 0xffff;

  BAGUA_HD static int32_t nearest_exponent(int32_t bits) { return (bits + 0x400000) >> 23; }
};

}  // namespace bagua
