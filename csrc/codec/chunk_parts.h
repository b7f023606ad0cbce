// Steps that the CPU loops and the CUDA kernels of a chunk share.
#pragma once

#include <cstddef>
#include <cstdint>

#include "base/dtype.h"
#include "base/intrinsics.h"
#include "codec/chunk_format.h"
#include "codec/codecs/minmax_uint8.h"

namespace bagua {

// Formats with ranges (the 8-bit ones) and formats that convert each element by itself.
template <typename Format>
concept RangedFormat = requires { Format::kBlockNumel; };
template <typename Format>
concept CastFormat = requires { typename Format::Element; };

template <typename Format>
BAGUA_HD constexpr int64_t format_payload_bytes(int64_t element_bytes, int64_t chunk_numel) {
  if constexpr (RangedFormat<Format>) {
    return ranged_layout(Format::kBlockNumel, element_bytes, chunk_numel).payload_bytes;
  } else {
    return align_payload(chunk_numel * static_cast<int64_t>(sizeof(typename Format::Element)));
  }
}

// Elements that share a range, as Codec::block_numel says it.
template <typename Format>
constexpr int64_t format_block_numel() {
  if constexpr (RangedFormat<Format>) {
    return Format::kBlockNumel;
  } else {
    return 1;
  }
}

// A range while its values are met, in any order: starts from (kStartLow, kStartHigh, 0).
// Comparisons skip NaN, hence the marks.
constexpr float kStartLow = kLargestFinite<float>;
constexpr float kStartHigh = -kLargestFinite<float>;

BAGUA_HD void extend_range(float value, float& low, float& high, uint32_t& marks) {
  low = lesser(value, low);
  high = greater(value, high);
  marks |= non_finite_mark(value);
}

// The range of all values met: Note [Non-finite values]. Which of two zeros a reduction ends with
// depends on its order; adding zero makes both +0.
BAGUA_HD ValueRange finished_range(float low, float high, bool all_finite) {
  if (!all_finite) {
    const float nan = bits_to_float(kFloatQuietNanBits);
    return {nan, nan};
  }
  return {low + 0.0f, high + 0.0f};
}

template <typename T>
BAGUA_HD void write_header(ValueRange range, std::byte* header) {
  const T pair[2] = {narrow<T>(range.min), narrow<T>(range.max)};
  __builtin_memcpy(__builtin_assume_aligned(header, sizeof(T)), pair, sizeof(pair));
}

template <typename T>
BAGUA_HD ValueRange read_header(const std::byte* header) {
  T pair[2];
  __builtin_memcpy(pair, __builtin_assume_aligned(header, sizeof(T)), sizeof(pair));
  return {widen(pair[0]), widen(pair[1])};
}

// Adds a decoded element to a sum, as decode_add does: two f32 operations, never one.
template <typename T>
BAGUA_HD float add_weighted(float sum, float weight, T value) {
  return sum + weight * widen(value);
}

// Destination of a decoded element: it is stored, or added to a sum.
template <typename T>
struct Store {
  T* x;
  BAGUA_HD void operator()(int64_t i, T value) const { x[i] = value; }
};
template <typename T>
struct AddWeighted {
  float* x;
  float weight;
  BAGUA_HD void operator()(int64_t i, T value) const { x[i] = add_weighted(x[i], weight, value); }
};

}  // namespace bagua
