// The loops over the elements of one chunk, for any element type and format.
//
// They are written for the compiler's vectoriser: no branches inside, no calls that are not
// inlined. Included by chunk_codec_cpu.cpp only, which compiles them once per instruction set.
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <cstring>

#include "base/dtype.h"
#include "codec/chunk_format.h"
#include "codec/minmax_uint8.h"

namespace bagua {

// Formats with ranges (the 8-bit ones) and formats that convert each element by itself.
template <typename Format>
concept RangedFormat = requires { Format::kBlockNumel; };
template <typename Format>
concept CastFormat = requires { typename Format::Element; };

// Memory is asked for ahead of its use, a tile at a time, where the processor's own guess was
// measured to fall behind: while encode reads a block for the second time, from the cache (a fourth
// faster), and in decode_add, which reads two arrays at different speeds (a tenth). The distances
// are measured too.
constexpr int64_t kTile = 256;
constexpr int64_t kCacheLineBytes = 64;
constexpr int64_t kEncodeAhead = 8 * kTile;
constexpr int64_t kSumAhead = 24 * kTile;
constexpr int64_t kCodesAhead = 12 * kTile;

// Asks for the tile that starts at x[begin], or the last of x[0, numel); numel >= kTile.
template <typename T>
BAGUA_HD void prefetch_tile(const T* x, int64_t begin, int64_t numel) {
  const T* tile = x + std::min(begin, numel - kTile);
  for (int64_t i = 0; i < kTile; i += kCacheLineBytes / sizeof(T)) __builtin_prefetch(tile + i);
}

// What becomes of a decoded element: it is stored, or added to a sum.
template <typename T>
struct Store {
  T* x;
  BAGUA_HD void operator()(int64_t i, T value) const { x[i] = value; }
  BAGUA_HD void prefetch(const uint8_t*, int64_t, int64_t) const {}
};
template <typename T>
struct AddWeighted {
  float* sum;
  float weight;
  BAGUA_HD void operator()(int64_t i, T value) const { sum[i] += weight * widen(value); }
  BAGUA_HD void prefetch(const uint8_t* codes, int64_t i, int64_t numel) const {
    prefetch_tile(sum, i + kSumAhead, numel);
    prefetch_tile(codes, i + kCodesAhead, numel);
  }
};

// The range of x[0, numel). A reduction vectorises only as independent lanes, folded at the end.
template <typename T>
BAGUA_HD ValueRange find_range(const T* __restrict x, int64_t numel) {
  constexpr int kLanes = 32;
  float low[kLanes];
  float high[kLanes];
  uint32_t seen[kLanes];
  for (int lane = 0; lane < kLanes; ++lane) {
    low[lane] = kLargestFinite<float>;
    high[lane] = -kLargestFinite<float>;
    seen[lane] = 0;
  }
  const auto take = [&](int lane, float value) __attribute__((always_inline)) {
    low[lane] = value < low[lane] ? value : low[lane];
    high[lane] = value > high[lane] ? value : high[lane];
    // The addition carries into the top bit exactly if the exponent is all ones: NaN or infinite.
    seen[lane] |= (float_to_bits(value) & 0x7fffffff) + 0x00800000;
  };
  const int64_t whole = numel / kLanes * kLanes;
  for (int64_t i = 0; i < whole; i += kLanes) {
    for (int lane = 0; lane < kLanes; ++lane) take(lane, widen(x[i + lane]));
  }
  for (int64_t i = whole; i < numel; ++i) take(static_cast<int>(i - whole), widen(x[i]));
  for (int width = kLanes / 2; width > 0; width /= 2) {
    for (int lane = 0; lane < width; ++lane) {
      low[lane] = low[lane + width] < low[lane] ? low[lane + width] : low[lane];
      high[lane] = high[lane + width] > high[lane] ? high[lane + width] : high[lane];
      seen[lane] |= seen[lane + width];
    }
  }
  if (seen[0] >> 31) {
    const float nan = bits_to_float(kFloatQuietNanBits);
    return {nan, nan};
  }
  // Which of two zeros a reduction meets first depends on its order; adding zero makes both +0.
  return {low[0] + 0.0f, high[0] + 0.0f};
}

template <typename T>
BAGUA_HD void write_header(ValueRange range, std::byte* header) {
  const T pair[2] = {narrow<T>(range.min), narrow<T>(range.max)};
  std::memcpy(header, pair, sizeof(pair));
}

template <typename T>
BAGUA_HD ValueRange read_header(const std::byte* header) {
  T pair[2];
  std::memcpy(pair, header, sizeof(pair));
  return {widen(pair[0]), widen(pair[1])};
}

template <RangedFormat Format, typename T>
BAGUA_HD void encode_chunk(const T* __restrict x, int64_t numel, std::byte* __restrict payload) {
  const RangedLayout layout = ranged_layout(Format::kBlockNumel, sizeof(T), numel);
  uint8_t* __restrict codes = reinterpret_cast<uint8_t*>(payload + layout.codes_offset);
  std::byte* header = payload;
  for (int64_t begin = 0; begin < numel; begin += layout.range_numel) {
    const int64_t end = std::min(begin + layout.range_numel, numel);
    const ValueRange range = find_range(x + begin, end - begin);
    const QuantisationGrid grid = quantisation_grid(range);
    write_header<T>(range, header);
    header += 2 * sizeof(T);
    if (grid.constant) {
      std::memset(codes + begin, 0, end - begin);
    } else {
      int64_t i = begin;
      for (; i + kTile <= end; i += kTile) {
        prefetch_tile(x, i + kEncodeAhead, numel);
        for (int64_t j = i; j < i + kTile; ++j) codes[j] = quantise(widen(x[j]), grid);
      }
      for (; i < end; ++i) codes[i] = quantise(widen(x[i]), grid);
    }
  }
  std::memset(header, 0, payload + layout.codes_offset - header);
  std::memset(codes + numel, 0, layout.payload_bytes - layout.codes_offset - numel);
}

template <RangedFormat Format, typename T, typename Sink>
BAGUA_HD void decode_chunk(const std::byte* __restrict payload, int64_t numel, Sink sink) {
  const RangedLayout layout = ranged_layout(Format::kBlockNumel, sizeof(T), numel);
  const uint8_t* __restrict codes = reinterpret_cast<const uint8_t*>(payload + layout.codes_offset);
  const std::byte* header = payload;
  for (int64_t begin = 0; begin < numel; begin += layout.range_numel) {
    const int64_t end = std::min(begin + layout.range_numel, numel);
    const QuantisationGrid grid = quantisation_grid(read_header<T>(header));
    header += 2 * sizeof(T);
    int64_t i = begin;
    for (; i + kTile <= end; i += kTile) {
      sink.prefetch(codes, i, numel);
      for (int64_t j = i; j < i + kTile; ++j) sink(j, dequantise<T>(codes[j], grid));
    }
    for (; i < end; ++i) sink(i, dequantise<T>(codes[i], grid));
  }
}

template <CastFormat Format, typename T>
BAGUA_HD void encode_chunk(const T* __restrict x, int64_t numel, std::byte* __restrict payload) {
  using Element = typename Format::Element;
  Element* __restrict elements = reinterpret_cast<Element*>(payload);
  for (int64_t i = 0; i < numel; ++i) elements[i] = narrow<Element>(widen(x[i]));
  const int64_t bytes = numel * static_cast<int64_t>(sizeof(Element));
  std::memset(payload + bytes, 0, align_payload(bytes) - bytes);
}

template <CastFormat Format, typename T, typename Sink>
BAGUA_HD void decode_chunk(const std::byte* __restrict payload, int64_t numel, Sink sink) {
  using Element = typename Format::Element;
  const Element* __restrict elements = reinterpret_cast<const Element*>(payload);
  for (int64_t i = 0; i < numel; ++i) sink(i, narrow<T>(widen(elements[i])));
}

}  // namespace bagua
