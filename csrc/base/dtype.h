// The dtypes that codecs read and write, and their conversions from and to float.
//
// The 16-bit types are storage only: arithmetic is done in float. The conversions are plain integer
// and float operations with selects instead of branches, so that the compiler vectorises them for
// every instruction set. Narrowing rounds to nearest, ties to even; what is too large becomes
// infinite; every NaN becomes one and the same quiet NaN. The device has instructions for the same
// conversions (a tenth of the time); only a NaN widened from Half may have other bits there.
#pragma once

#include <cstdint>
#include <utility>

#include "base/check.h"
#include "base/host_device.h"

namespace bagua {

enum class DType : uint8_t { kFloat32 = 0, kFloat16 = 1, kBFloat16 = 2 };

constexpr int64_t dtype_bytes(DType dtype) { return dtype == DType::kFloat32 ? 4 : 2; }

constexpr const char* dtype_name(DType dtype) {
  return dtype == DType::kFloat32 ? "float32" : dtype == DType::kFloat16 ? "float16" : "bfloat16";
}

// IEEE 754 binary16.
struct Half {
  uint16_t bits;
};

// The upper half of an IEEE 754 binary32.
struct BFloat16 {
  uint16_t bits;
};

// Calls function(T{}) with the element type T of `dtype`: float, Half or BFloat16.
template <typename Function>
decltype(auto) visit_dtype(DType dtype, Function&& function) {
  switch (dtype) {
    case DType::kFloat16:
      return std::forward<Function>(function)(Half{});
    case DType::kBFloat16:
      return std::forward<Function>(function)(BFloat16{});
    default:
      return std::forward<Function>(function)(float{});
  }
}

BAGUA_HD uint32_t float_to_bits(float value) { return __builtin_bit_cast(uint32_t, value); }

BAGUA_HD float bits_to_float(uint32_t bits) { return __builtin_bit_cast(float, bits); }

constexpr uint32_t kFloatInfinityBits = 0x7f800000;
constexpr uint32_t kFloatQuietNanBits = 0x7fc00000;

BAGUA_HD float widen(float value) { return value; }

BAGUA_HD float widen(BFloat16 value) { return bits_to_float(uint32_t{value.bits} << 16); }

BAGUA_HD float widen(Half value) {
#ifdef __CUDA_ARCH__
  float widened;
  asm("cvt.f32.f16 %0, %1;" : "=f"(widened) : "h"(value.bits));
  return widened;
#else
  // The exponent biases differ by 112; the all-ones exponent moves by twice that.
  constexpr uint32_t kBias = 112u << 23;
  const uint32_t sign = (uint32_t{value.bits} & 0x8000) << 16;
  const uint32_t magnitude = uint32_t{value.bits} & 0x7fff;
  const uint32_t normal = (magnitude << 13) + (magnitude < 0x7c00 ? kBias : 2 * kBias);
  // A subnormal counts units of 2^-24.
  const uint32_t subnormal =
      float_to_bits(static_cast<float>(static_cast<int32_t>(magnitude)) * 0x1p-24f);
  return bits_to_float((magnitude < 0x0400 ? subnormal : normal) | sign);
#endif
}

template <typename T>
T narrow(float value) = delete;

template <>
BAGUA_HD float narrow<float>(float value) {
  return value;
}

template <>
BAGUA_HD BFloat16 narrow<BFloat16>(float value) {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 800
  uint32_t narrowed;  // the conversion of a pair, of which one is zero, has the higher throughput
  asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(narrowed) : "f"(0.0f), "f"(value));
  return BFloat16{static_cast<uint16_t>(value == value ? narrowed : kFloatQuietNanBits >> 16)};
#else
  const uint32_t bits = float_to_bits(value);
  const uint32_t rounded = (bits + 0x7fff + ((bits >> 16) & 1)) >> 16;
  const bool is_nan = (bits & 0x7fffffff) > kFloatInfinityBits;
  return BFloat16{static_cast<uint16_t>(is_nan ? kFloatQuietNanBits >> 16 : rounded)};
#endif
}

template <>
BAGUA_HD Half narrow<Half>(float value) {
  constexpr uint32_t kQuietNan = 0x7e00;
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 800
  uint32_t narrowed;
  asm("cvt.rn.f16x2.f32 %0, %1, %2;" : "=r"(narrowed) : "f"(0.0f), "f"(value));
  return Half{static_cast<uint16_t>(value == value ? narrowed : kQuietNan)};
#else
  constexpr uint32_t kBias = 112u << 23;
  constexpr uint32_t kSmallestNormal = 113u << 23;  // 2^-14
  constexpr uint32_t kInfinity = 0x7c00;
  const uint32_t sign = (float_to_bits(value) >> 16) & 0x8000;
  const uint32_t magnitude = float_to_bits(value) & 0x7fffffff;
  const uint32_t normal = (magnitude - kBias + 0xfff + ((magnitude >> 13) & 1)) >> 13;
  // The unit in the last place of numbers just above 0.5 is 2^-24, a half's smallest step: adding
  // 0.5 lets the hardware round.
  const uint32_t subnormal = float_to_bits(bits_to_float(magnitude) + 0.5f) - float_to_bits(0.5f);
  const uint32_t finite = magnitude < kSmallestNormal ? subnormal : normal;
  const uint32_t bounded = finite < kInfinity ? finite : kInfinity;
  const bool is_nan = magnitude > kFloatInfinityBits;
  return Half{static_cast<uint16_t>(is_nan ? kQuietNan : bounded | sign)};
#endif
}

template <typename T>
inline constexpr float kLargestFinite = 0x1.fffffep127f;
template <>
inline constexpr float kLargestFinite<Half> = 65504.0f;
template <>
inline constexpr float kLargestFinite<BFloat16> = 0x1.fep127f;

// narrow, but a number too large for T stays the largest one of T. NaN stays NaN.
template <typename T>
BAGUA_HD T narrow_finite(float value) {
  constexpr float kLargest = kLargestFinite<T>;
  // Written so that NaN passes.
  const float below = kLargest < value ? kLargest : value;
  return narrow<T>(below < -kLargest ? -kLargest : below);
}

}  // namespace bagua
