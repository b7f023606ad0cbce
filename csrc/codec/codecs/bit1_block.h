// bit1_block: the sign of each element, and one magnitude per block.
//
// The magnitude is the mean of the block's, rounded to bfloat16: of all multiples of the signs the
// nearest one. Steps for a block of n elements, each an IEEE float operation rounded to nearest
// even, never contracted:
//   1. magnitude = (sum of |value| / 2^8) / n * 2^8, rounded to bfloat16
//   2. code = the value's sign
//   3. value' = magnitude with the sign
// The sum is that of Note [Formats]; the 2^8 keeps it finite.
#pragma once

#include <cstdint>

#include "base/dtype.h"
#include "base/host_device.h"
#include "codec/chunk_parts.h"
#include "codec/codecs/magnitudes.h"

namespace bagua {

struct Bit1Block {
  static constexpr int kBits = 1;
  static constexpr int64_t kBlockNumel = 256;

  template <typename T>
  using Header = BFloat16;

  struct Grid {
    uint32_t magnitude;  // bits
    bool constant;
  };

  template <typename T, typename Values>
  BAGUA_HD static Encoding<BFloat16, Grid> encoding(const Values& values) {
    const float shares = values.template collect<SumOfShares>().sum[0];
    const BFloat16 header = mean_magnitude(shares, static_cast<float>(values.numel()));
    if (!(shares <= kLargestFinite<float>)) {
      return {{static_cast<uint16_t>(kFloatQuietNanBits >> 16)}, {0, true}};
    }
    return {header, grid(header)};
  }

  BAGUA_HD static Grid grid(BFloat16 header) { return {uint32_t{header.bits} << 16, false}; }

  BAGUA_HD static uint8_t quantise(float value, Grid) {
    return static_cast<uint8_t>(float_to_bits(value) >> 31);
  }

  // Rounds to T; stays finite in T if the magnitude is finite.
  template <typename T>
  BAGUA_HD static T dequantise(uint8_t code, Grid grid) {
    return narrow_finite<T>(bits_to_float(grid.magnitude ^ (uint32_t{code} << 31)));
  }
};

}  // namespace bagua
