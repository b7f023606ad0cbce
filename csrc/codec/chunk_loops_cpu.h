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
#include "codec/chunk_parts.h"
#include "codec/codecs/minmax_uint8.h"

namespace bagua {

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

// The sinks of decoded elements with what they ask for ahead.
template <typename T>
struct StoreAhead : Store<T> {
  BAGUA_HD void prefetch(const uint8_t*, int64_t, int64_t) const {}
};
template <typename T>
struct AddWeightedAhead : AddWeighted<T> {
  BAGUA_HD void prefetch(const uint8_t* codes, int64_t i, int64_t numel) const {
    prefetch_tile(this->x, i + kSumAhead, numel);
    prefetch_tile(codes, i + kCodesAhead, numel);
  }
};

// The range of x[0, numel). A reduction vectorises only as independent lanes, folded at the end.
template <typename T>
BAGUA_HD ValueRange find_range(const T* __restrict x, int64_t numel) {
  constexpr int kLanes = 32;
  float low[kLanes];
  float high[kLanes];
  uint32_t marks[kLanes];
  for (int lane = 0; lane < kLanes; ++lane) {
    low[lane] = kStartLow;
    high[lane] = kStartHigh;
    marks[lane] = 0;
  }
  const auto take = [&](int lane, float value) __attribute__((always_inline)) {
    extend_range(value, low[lane], high[lane], marks[lane]);
  };
  const int64_t whole = numel / kLanes * kLanes;
  for (int64_t i = 0; i < whole; i += kLanes) {
    for (int lane = 0; lane < kLanes; ++lane) take(lane, widen(x[i + lane]));
  }
  for (int64_t i = whole; i < numel; ++i) take(static_cast<int>(i - whole), widen(x[i]));
  for (int width = kLanes / 2; width > 0; width /= 2) {
    for (int lane = 0; lane < width; ++lane) {
      low[lane] = lesser(low[lane + width], low[lane]);
      high[lane] = greater(high[lane + width], high[lane]);
      marks[lane] |= marks[lane + width];
    }
  }
  return finished_range(low[0], high[0], !is_marked(marks[0]));
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
