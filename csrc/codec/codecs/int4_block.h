// int4_block: 4 bits per element and one scale of 16 bits per block.
//
// There are 16 levels, from -8 to 7 times the scale, and the scale takes the sign that makes the
// element of largest magnitude level -8: no level is wasted, which is 12 % less error than -7 to 7.
// Steps for a block whose element of largest magnitude is `extreme` (the positive one of two), each
// an IEEE float operation rounded to nearest even, never contracted:
//   1. size = |extreme| / 8. Below 2^-100 the block is zero: the scale is 0, the codes are 8
//   2. scale = size, rounded to bfloat16 away from zero, with the sign opposite to the extreme's
//   3. code = rint(min(value * (1 / scale), 7)) + 8
//   4. value' = (code - 8) * scale
// Step 3 needs no bound from below, because the scale is rounded up. The product of step 4 is
// exact. A smallest scale keeps 1 / scale finite. It matters to a residual that halves in every
// round: below that size it stays unchanged.
#pragma once

#include <cstdint>

#include "base/dtype.h"
#include "base/host_device.h"
#include "base/intrinsics.h"

namespace bagua {

struct Int4Block {
  static constexpr int kBits = 4;
  static constexpr int64_t kBlockNumel = 128;
  static constexpr int kLanes = 32;

  // The bits of the largest positive number, and of the largest negative one without its sign, as
  // integers, which compilers reduce in vectors. Infinity and NaN are larger than any number.
  template <int kCount>
  struct Extent {
    int32_t positive[kCount];
    int32_t negative[kCount];

    BAGUA_HD void start(int lane) { positive[lane] = negative[lane] = 0; }
    BAGUA_HD void take(int lane, float value) {
      const uint32_t bits = float_to_bits(value);
      raise(positive[lane], static_cast<int32_t>(bits));
      raise(negative[lane], static_cast<int32_t>(bits ^ kSign));
    }
    template <int kOthers>
    BAGUA_HD void join(int lane, const Extent<kOthers>& other, int from) {
      raise(positive[lane], other.positive[from]);
      raise(negative[lane], other.negative[from]);
    }

   private:
    BAGUA_HD static void raise(int32_t& most, int32_t bits) { most = bits > most ? bits : most; }
  };

  template <typename T>
  using Header = BFloat16;

  template <typename T>
  BAGUA_HD static BFloat16 header(const Extent<1>& extent) {
    const bool from_positive = extent.positive[0] >= extent.negative[0];
    const int32_t extreme = from_positive ? extent.positive[0] : extent.negative[0];
    if (extreme >= static_cast<int32_t>(kFloatInfinityBits)) {
      return {static_cast<uint16_t>(kFloatQuietNanBits >> 16)};
    }
    const float size = bits_to_float(static_cast<uint32_t>(extreme)) * 0.125f;
    if (size < 0x1p-100f) return {0};
    const uint32_t sign = from_positive ? kSign : 0;
    return {static_cast<uint16_t>((sign | (float_to_bits(size) + 0xffff)) >> 16)};
  }

  struct Grid {
    float scale;
    float inverse;  // 0 where the scale is: every code is 8 then
    bool constant;
  };

  BAGUA_HD static Grid grid(BFloat16 header) {
    const float scale = widen(header);
    return {scale, scale == 0.0f ? 0.0f : 1.0f / scale, scale != scale};
  }

  BAGUA_HD static uint8_t quantise(float value, Grid grid) {
    return static_cast<uint8_t>(nearest_int32(lesser(value * grid.inverse, 7.0f)) + 8);
  }

  // Rounds to T; stays finite in T if the scale is finite.
  template <typename T>
  BAGUA_HD static T dequantise(uint8_t code, Grid grid) {
    return narrow_finite<T>(static_cast<float>(static_cast<int32_t>(code) - 8) * grid.scale);
  }

 private:
  static constexpr uint32_t kSign = 0x80000000;
};

}  // namespace bagua
