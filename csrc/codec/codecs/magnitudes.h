// Sums and means of magnitudes, which the formats of one and two bits share.
#pragma once

#include <cstdint>

#include "base/dtype.h"
#include "base/host_device.h"

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

}  // namespace bagua
