// Operations with different names on host and device, and equal results.
//
// The compilers of both sides take __builtin_rintf and __builtin_fmaf; what is here
// is either missing on one side or several instructions there instead of one.
#pragma once

#include <cstdint>

#include "base/host_device.h"

namespace bagua {

// The smaller and the larger of two numbers; where the first is NaN, the second. Which of two zeros
// is returned is open: a select keeps the second, the device's instruction orders -0 before +0.
BAGUA_HD float lesser(float first, float second) {
#ifdef __CUDA_ARCH__
  return fminf(first, second);
#else
  return first < second ? first : second;
#endif
}

BAGUA_HD float greater(float first, float second) {
#ifdef __CUDA_ARCH__
  return fmaxf(first, second);
#else
  return first > second ? first : second;
#endif
}

// To the nearest whole number, ties to even. The result must fit.
BAGUA_HD int32_t nearest_int32(float value) {
#ifdef __CUDA_ARCH__
  return __float2int_rn(value);
#else
  return __builtin_irintf(value);
#endif
}

// Marks record whether a NaN or an infinity was among many numbers: they are joined with |, and
// numbers that are finite leave no trace in what is_marked looks at.
BAGUA_HD uint32_t non_finite_mark(float value) {
#ifdef __CUDA_ARCH__
  return __float_as_uint(value - value);  // +0 or NaN; not on the pipe that comparisons keep busy
#else
  // The addition carries into the highest bit exactly if the exponent is all ones.
  return (__builtin_bit_cast(uint32_t, value) & 0x7fffffff) + 0x00800000;
#endif
}

BAGUA_HD bool is_marked(uint32_t marks) {
#ifdef __CUDA_ARCH__
  return marks != 0;
#else
  return marks >> 31 != 0;
#endif
}

}  // namespace bagua
