// bit2_block: 2 bits per element, its sign and which of two magnitudes, and these two per block.
//
// The magnitudes are the means of what lies above the block's root mean square and of the rest: an
// orthogonal projection, so that the error is never larger than the block. Steps for a block of n
// elements, each an IEEE float operation rounded to nearest even, never contracted:
//   1. threshold = sqrt(sum of value^2 / n); infinite if the sum is not finite
//   2. high = the mean of |value| over |value| > threshold, low = the mean over the others, each as
//      (sum of |value| / 2^8) / count * 2^8, rounded to bfloat16. The mean of no elements is the
//      other one
//   3. code = 2 * (the value's sign) + (|value| > threshold); without the last where low = high
//   4. value' = low or high with the sign
// Sums are those of Note [Formats]. The 2^8 keeps the sum of large elements finite; where the
// squares overflow, from 2^64 on, or underflow, the block has one magnitude. Where one is as good
// as two, codes do not tell them apart, so that decoded values encode to the same bytes.
#pragma once

#include <cstdint>

#include "base/dtype.h"
#include "base/host_device.h"
#include "codec/chunk_parts.h"

namespace bagua {

// Bits of |value|. As signed integers they have the order of magnitudes; NaN is above infinity.
BAGUA_HD int32_t magnitude_bits(float value) {
  return static_cast<int32_t>(float_to_bits(value) & 0x7fffffff);
}

// No magnitude has larger bits.
constexpr int32_t kNoMagnitude = 0x7fffffff;

// |value| / 2^8, of which 2^8 finite ones have a finite sum.
BAGUA_HD float share_of_magnitude(float value) {
  return bits_to_float(static_cast<uint32_t>(magnitude_bits(value))) * 0x1p-8f;
}

// The mean of `count` magnitudes whose shares have this sum. NaN or too large for count 0.
BAGUA_HD BFloat16 mean_magnitude(float shares, float count) {
  return narrow_finite<BFloat16>(shares / count * 0x1p8f);
}

template <int kCount>
struct SumOfSquares {
  float sum[kCount];

  BAGUA_HD void start(int lane) { sum[lane] = 0; }
  BAGUA_HD void take(int lane, float value) { sum[lane] += value * value; }
  template <int kOthers>
  BAGUA_HD void join(int lane, const SumOfSquares<kOthers>& other, int from) {
    sum[lane] += other.sum[from];
  }
};

template <int kCount>
struct SumOfShares {
  float sum[kCount];

  BAGUA_HD void start(int lane) { sum[lane] = 0; }
  BAGUA_HD void take(int lane, float value) { sum[lane] += share_of_magnitude(value); }
  template <int kOthers>
  BAGUA_HD void join(int lane, const SumOfShares<kOthers>& other, int from) {
    sum[lane] += other.sum[from];
  }
};

struct Bit2Block {
  static constexpr int kBits = 2;
  static constexpr int64_t kBlockNumel = 256;

  template <typename T>
  struct Header {
    BFloat16 low;
    BFloat16 high;
  };

  struct Quantiser {
    int32_t threshold;  // its bits: magnitudes compare as integers do
    bool constant;
  };

  template <typename T, typename Values>
  BAGUA_HD static Encoding<Header<T>, Quantiser> encoding(const Values& values) {
    const float squares = values.template collect<SumOfSquares>().sum[0];
    const float mean = squares / static_cast<float>(values.numel());
    int32_t threshold = magnitude_bits(__builtin_sqrtf(mean));
    const auto sides = values.template collect<Sides>(threshold);
    const auto count = static_cast<float>(sides.above[0]);
    const float others = static_cast<float>(values.numel()) - count;
    if (!(sides.low[0] + sides.high[0] <= kLargestFinite<float>)) {
      const BFloat16 nan{static_cast<uint16_t>(kFloatQuietNanBits >> 16)};
      return {{nan, nan}, {0, true}};
    }
    const BFloat16 above = mean_magnitude(sides.high[0], count);
    const BFloat16 below = mean_magnitude(sides.low[0], others);
    const BFloat16 high = count == 0.0f ? below : above;
    const BFloat16 low = others == 0.0f ? above : below;
    if (low.bits == high.bits) threshold = kNoMagnitude;
    return {{low, high}, {threshold, false}};
  }

  BAGUA_HD static uint8_t quantise(float value, Quantiser quantiser) {
    const uint32_t sign = float_to_bits(value) >> 31;
    const uint32_t above = magnitude_bits(value) > quantiser.threshold;
    return static_cast<uint8_t>(sign * 2 + above);
  }

  struct Grid {
    uint32_t low;  // bits
    uint32_t high;
  };

  template <typename T>
  BAGUA_HD static Grid grid(Header<T> header) {
    return {uint32_t{header.low.bits} << 16, uint32_t{header.high.bits} << 16};
  }

  // Rounds to T; stays finite in T if the magnitudes are finite.
  template <typename T>
  BAGUA_HD static T dequantise(uint8_t code, Grid grid) {
    const uint32_t bits = (code & 1) != 0 ? grid.high : grid.low;
    return narrow_finite<T>(bits_to_float(bits ^ (uint32_t{code} >> 1 << 31)));
  }

 private:
  template <int kCount>
  struct Sides {
    float low[kCount];  // sums of |value| / 2^8
    float high[kCount];
    int32_t above[kCount];  // number of values in `high`

    BAGUA_HD void start(int lane) {
      low[lane] = high[lane] = 0;
      above[lane] = 0;
    }
    BAGUA_HD void take(int lane, float value, int32_t threshold) {
      const bool is_above = magnitude_bits(value) > threshold;
      const float share = share_of_magnitude(value);
      low[lane] += is_above ? 0.0f : share;
      high[lane] += is_above ? share : 0.0f;
      above[lane] += is_above;
    }
    template <int kOthers>
    BAGUA_HD void join(int lane, const Sides<kOthers>& other, int from) {
      low[lane] += other.low[from];
      high[lane] += other.high[from];
      above[lane] += other.above[from];
    }
  };
};

}  // namespace bagua
