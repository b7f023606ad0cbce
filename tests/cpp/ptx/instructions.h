// Instructions of PTX, as far as nvcc uses them for our kernels, for C++ that
// tests/support/programs/ptx_to_cpp.py makes of PTX. Registers hold bits; the functions take them
// and give numbers, of which bits() makes bits again.
#pragma once

#include <algorithm>
#include <array>
#include <bit>
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <type_traits>

#include "emulation/cuda_emulation.h"

namespace bagua::ptx {

using emulation::Location;
using emulation::WarpOperation;
using pred = bool;
using b8 = uint8_t;
using b16 = uint16_t;
using b32 = uint32_t;
using b64 = uint64_t;
using u8 = uint8_t;
using u16 = uint16_t;
using u32 = uint32_t;
using u64 = uint64_t;
using s8 = int8_t;
using s16 = int16_t;
using s32 = int32_t;
using s64 = int64_t;
using f32 = float;
using f64 = double;
struct f16 {
  b16 bits;
};
struct f16x2;
struct bf16x2;

// A kernel by its mangled name.
struct Translation {
  const char* name;
  void (*run)(const std::byte* parameters);
  size_t parameter_bytes;
};
extern const Translation* const kTranslations[];  // of each file; both levels end with null

inline b64 address_of(const std::byte* memory) { return reinterpret_cast<b64>(memory); }

// The number that bits stand for, and the other way round.
template <typename T, typename Bits>
T number(Bits given) {
  if constexpr (std::is_same_v<T, f32>) {
    return std::bit_cast<f32>(static_cast<b32>(given));
  } else if constexpr (std::is_same_v<T, f64>) {
    return std::bit_cast<f64>(static_cast<b64>(given));
  } else {
    return static_cast<T>(given);
  }
}
template <typename T>
auto bits(T given) {
  if constexpr (std::is_same_v<T, f32>) {
    return std::bit_cast<b32>(given);
  } else if constexpr (std::is_same_v<T, f64>) {
    return std::bit_cast<b64>(given);
  } else {
    return given;
  }
}

// Signed sums wrap.
template <typename T>
using Wrapping = typename std::conditional_t<std::is_signed_v<T> && std::is_integral_v<T>,
                                             std::make_unsigned<T>, std::type_identity<T>>::type;

#define BAGUA_PTX_BINARY(name, expression)      \
  template <typename T, typename A, typename B> \
  T op_##name(A first, B second) {              \
    const auto a = number<Wrapping<T>>(first);  \
    const auto b = number<Wrapping<T>>(second); \
    return static_cast<T>(expression);          \
  }
BAGUA_PTX_BINARY(add, a + b)
BAGUA_PTX_BINARY(sub, a - b)
BAGUA_PTX_BINARY(mul_lo, a* b)
BAGUA_PTX_BINARY(add_rn, a + b)
BAGUA_PTX_BINARY(sub_rn, a - b)
BAGUA_PTX_BINARY(mul_rn, a* b)
BAGUA_PTX_BINARY(div_rn, a / b)
BAGUA_PTX_BINARY(and, a& b)
BAGUA_PTX_BINARY(or, a | b)
BAGUA_PTX_BINARY(xor, a ^ b)
#undef BAGUA_PTX_BINARY

// Comparisons: those of numbers, which a NaN makes false, and those with u, which it makes true.
#define BAGUA_PTX_COMPARE(name, expression)     \
  template <typename T, typename A, typename B> \
  pred op_setp_##name(A first, B second) {      \
    const T a = number<T>(first);               \
    const T b = number<T>(second);              \
    return expression;                          \
  }
BAGUA_PTX_COMPARE(eq, a == b)
BAGUA_PTX_COMPARE(ne, a == a && b == b && a != b)
BAGUA_PTX_COMPARE(lt, a < b)
BAGUA_PTX_COMPARE(le, a <= b)
BAGUA_PTX_COMPARE(gt, a > b)
BAGUA_PTX_COMPARE(ge, a >= b)
BAGUA_PTX_COMPARE(num, a == a && b == b)
BAGUA_PTX_COMPARE(nan, a != a || b != b)
BAGUA_PTX_COMPARE(neu, a != b)
BAGUA_PTX_COMPARE(ltu, !(a >= b))
BAGUA_PTX_COMPARE(leu, !(a > b))
BAGUA_PTX_COMPARE(gtu, !(a <= b))
BAGUA_PTX_COMPARE(geu, !(a < b))
#undef BAGUA_PTX_COMPARE

template <typename T, typename A, typename B>
T op_div(A a, B b) {
  return number<T>(a) / number<T>(b);
}

// Of floats: a NaN gives way, and -0 is below +0.
template <typename T>
bool is_less(T a, T b) {
  if constexpr (std::is_floating_point_v<T>) {
    return a < b || (a == b && std::signbit(a) && !std::signbit(b));
  } else {
    return a < b;
  }
}
template <typename T>
T extreme(T a, T b, bool first) {
  if constexpr (std::is_same_v<T, f32>) {
    if (a != a && b != b) return number<f32>(0x7fffffffu);
    if (a != a || b != b) return a != a ? b : a;
  }
  return first ? a : b;
}
template <typename T, typename A, typename B>
T op_min(A a, B b) {
  return extreme(number<T>(a), number<T>(b), is_less(number<T>(a), number<T>(b)));
}
template <typename T, typename A, typename B>
T op_max(A a, B b) {
  return extreme(number<T>(a), number<T>(b), is_less(number<T>(b), number<T>(a)));
}

template <typename T, typename A, typename B>
auto op_mul_wide(A a, B b) {
  using Wide = std::conditional_t<std::is_signed_v<T>, s64, u64>;
  using Twice = std::conditional_t<std::is_signed_v<T>, s32, u32>;
  using Result = std::conditional_t<sizeof(T) == 4, Wide, Twice>;
  return static_cast<Result>(Result{number<T>(a)} * Result{number<T>(b)});
}
template <typename T, typename A, typename B, typename C>
T op_mad_lo(A a, B b, C c) {
  return op_add<T>(op_mul_lo<T>(a, b), c);
}
template <typename T, typename A, typename B, typename C>
T op_fma_rn(A a, B b, C c) {
  return std::fma(number<T>(a), number<T>(b), number<T>(c));
}
template <typename T, typename A>
T op_rcp_rn(A a) {
  return T{1} / number<T>(a);
}
template <typename T, typename A>
T op_sqrt_rn(A a) {
  return std::sqrt(number<T>(a));
}

// Signs of floats are bits, also those of a NaN.
template <typename T>
inline constexpr b64 kSign = b64{1} << (8 * sizeof(T) - 1);
template <typename T, typename A>
auto op_neg(A a) {
  using Bits = decltype(bits(T{}));
  if constexpr (std::is_floating_point_v<T>)
    return static_cast<Bits>(a ^ kSign<T>);
  else
    return static_cast<Bits>(0 - static_cast<Wrapping<T>>(a));
}
template <typename T, typename A>
T op_not(A a) {
  if constexpr (std::is_same_v<T, pred>)
    return !a;
  else
    return static_cast<T>(~number<T>(a));
}

template <typename T, typename A>
T op_shl(A a, b64 count) {
  return static_cast<b32>(count) < 8 * sizeof(T) ? static_cast<T>(number<T>(a) << count) : T{0};
}
template <typename T, typename A>
T op_shr(A a, b64 count) {
  constexpr b32 kLast = 8 * sizeof(T) - 1;
  if (static_cast<b32>(count) > kLast) return std::is_signed_v<T> ? number<T>(a) >> kLast : T{0};
  return static_cast<T>(number<T>(a) >> count);
}
// The lowest `length` bits of `field`, put into `into` from `position` on.
template <typename T, typename A, typename B>
T op_bfi(A field, B into, b64 position, b64 length) {
  const b64 ones = length >= 64 ? ~b64{0} : (b64{1} << length) - 1;
  if (position >= 8 * sizeof(T)) return number<T>(into);
  const T mask = static_cast<T>(ones << position);
  return (number<T>(into) & ~mask) | (static_cast<T>(b64{number<T>(field)} << position) & mask);
}
template <typename T>
T op_prmt(b64 a, b64 b, b64 selector) {
  const b64 bytes = b64{static_cast<b32>(b)} << 32 | static_cast<b32>(a);
  T result = 0;
  for (int i = 0; i < 4; ++i) {
    const b32 which = selector >> (4 * i) & 15;
    const b32 byte = bytes >> (8 * (which & 7)) & 0xff;
    result |= ((which & 8) == 0 ? byte : (byte & 0x80) != 0 ? 0xff : 0) << (8 * i);
  }
  return result;
}
template <typename T, typename A>
b32 op_popc(A a) {
  return std::popcount(number<T>(a));
}

// Bits go through unchanged.
template <typename T, typename A>
auto op_mov(A a) {
  return static_cast<decltype(bits(T{}))>(a);
}
template <typename T, size_t kParts>
T op_mov(std::array<b64, kParts> parts) {
  T joined = 0;
  for (size_t i = 0; i < kParts; ++i) joined |= parts[i] << (8 * sizeof(T) / kParts * i);
  return joined;
}
template <typename T, size_t kParts, typename A>
auto op_unpack(A whole) {
  std::array<b64, kParts> parts;
  constexpr size_t kBits = 8 * sizeof(T) / kParts;
  for (size_t i = 0; i < kParts; ++i) {
    parts[i] = b64{whole} >> (kBits * i) & ((b64{1} << kBits) - 1);
  }
  return parts;
}
template <typename T, typename A, typename B>
auto op_selp(A a, B b, pred first) {
  using Bits = decltype(bits(T{}));
  return first ? static_cast<Bits>(a) : static_cast<Bits>(b);
}

// Conversions. To integers beyond their range: the nearest; NaN: 0.
template <typename To, typename From, typename A>
To op_cvt(A a) {
  if constexpr (std::is_same_v<From, f16>) {
    const b32 sign = (a & 0x8000u) << 16, exponent = a >> 10 & 31, fraction = a & 0x3ff;
    if (exponent == 31) {
      return number<f32>(sign | 0x7f800000 | fraction << 13 | (fraction != 0 ? 0x400000 : 0));
    }
    const int whole = exponent == 0 ? fraction : fraction | 0x400;
    const f32 value = std::ldexp(static_cast<f32>(whole), (exponent == 0 ? 1 : exponent) - 25);
    return number<f32>(bits(value) | sign);
  } else {
    return static_cast<To>(number<From>(a));
  }
}
template <typename To, typename From, typename A>
To op_cvt_rn(A a) {
  return static_cast<To>(number<From>(a));
}
template <typename To>
To bounded(double value) {
  if (value != value) return 0;
  if (value >= 0x1p31) return INT32_MAX;
  return value <= -0x1p31 ? INT32_MIN : static_cast<To>(value);
}
template <typename To, typename From, typename A>
To op_cvt_rni(A a) {
  const From nearest = std::nearbyint(number<From>(a));
  if constexpr (std::is_same_v<To, From>)
    return nearest;
  else
    return bounded<To>(nearest);
}
template <typename To, typename From, typename A>
To op_cvt_rzi(A a) {
  return bounded<To>(std::trunc(number<From>(a)));
}
// A number of 16 bits with so many of fraction, whose smallest exponent is given.
inline b16 narrowed(f32 value, int fraction, int smallest) {
  const b16 sign = bits(value) >> 16 & 0x8000;
  if (value != value) return 0x7fff;
  const double magnitude = std::fabs(static_cast<double>(value));
  if (magnitude >= std::ldexp(1.0, 2 - smallest)) {
    return sign | ((3 - 2 * smallest) << fraction);
  }
  const int exponent = magnitude == 0 ? smallest : std::max(std::ilogb(magnitude), smallest);
  const b32 units = std::nearbyint(std::ldexp(magnitude, fraction - exponent));
  return sign | (((exponent - smallest) << fraction) + units);
}
template <typename To, typename From>
b32 op_cvt_rn(b32 upper, b32 lower) {
  constexpr bool kHalf = std::is_same_v<To, f16x2>;
  const auto one = [](b32 value) {
    return narrowed(number<f32>(value), kHalf ? 10 : 7, kHalf ? -14 : -126);
  };
  return b32{one(upper)} << 16 | one(lower);
}

// Memory.
template <typename T, int kCount>
auto op_ld(b64 address) {
  emulation::check_alignment(reinterpret_cast<const void*>(address), sizeof(T) * kCount);
  using Bits = decltype(bits(T{}));
  std::array<Bits, kCount> values;
  std::memcpy(values.data(), reinterpret_cast<const void*>(address), sizeof(values));
  if constexpr (kCount == 1)
    return values[0];
  else
    return values;
}
template <typename T, int kCount, typename Value>
void op_st(b64 address, Value value) {
  emulation::check_alignment(reinterpret_cast<const void*>(address), sizeof(T) * kCount);
  using Bits = decltype(bits(T{}));
  std::array<Bits, kCount> values;
  if constexpr (kCount == 1)
    values[0] = static_cast<Bits>(value);
  else
    for (int i = 0; i < kCount; ++i) values[i] = static_cast<Bits>(value[i]);
  std::memcpy(reinterpret_cast<void*>(address), values.data(), sizeof(values));
}
template <typename T, typename A>
T op_atom_add(b64 address, A value) {
  const T before = op_ld<T, 1>(address);
  op_st<T, 1>(address, before + number<T>(value));
  return before;
}

// Barriers, and operations of a warp.
inline void op_bar_sync(b64, const Location& location = Location::current()) {
  emulation::sync_threads(location);
}
inline void op_bar_warp_sync(b64 mask, const Location& location = Location::current()) {
  emulation::warp_operation(WarpOperation::kSync, mask, 0, 0, location);
}
template <typename T>
T shuffled(b64 value, b32 source, b64 mask, const Location& location) {
  return emulation::warp_operation(WarpOperation::kShuffle, mask, static_cast<b32>(value), source,
                                   location);
}
template <typename T>
T op_shfl_sync_bfly(b64 value, b64 lanes, b64, b64 mask,
                    const Location& location = Location::current()) {
  return shuffled<T>(value, emulation::lane() ^ static_cast<b32>(lanes), mask, location);
}
template <typename T>
T op_shfl_sync_idx(b64 value, b64 lane, b64, b64 mask,
                   const Location& location = Location::current()) {
  return shuffled<T>(value, static_cast<b32>(lane) % 32, mask, location);
}
template <typename T>
T op_vote_sync_ballot(pred value, b64 mask, const Location& location = Location::current()) {
  return emulation::warp_operation(WarpOperation::kBallot, mask, value, 0, location);
}
template <typename T>
T op_vote_sync_all(pred value, b64 mask, const Location& location = Location::current()) {
  return emulation::warp_operation(WarpOperation::kAll, mask, value, 0, location) != 0;
}

}  // namespace bagua::ptx
