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

// Elements of a tile: a whole block where blocks are smaller than kTile.
template <RangedFormat Format>
inline constexpr int64_t kTileOf =
    Format::kBlockNumel == 0 ? kTile : std::min(kTile, Format::kBlockNumel);

// Asks for x[begin, begin + kCount), or the last kCount of x[0, numel); numel >= kCount.
template <int64_t kCount, typename T>
BAGUA_HD void prefetch(const T* x, int64_t begin, int64_t numel) {
  const T* first = x + std::min(begin, numel - kCount);
  for (int64_t i = 0; i < kCount; i += kCacheLineBytes / sizeof(T)) __builtin_prefetch(first + i);
}

// AddWeighted with what it asks for ahead of element i of numel.
template <typename T>
struct AddWeightedAhead : AddWeighted<T> {
  template <RangedFormat Format>
  BAGUA_HD void prefetch_tile(const uint8_t* codes, int64_t i, int64_t numel) const {
    constexpr int64_t kPerByte = kCodesPerByte<Format>;
    prefetch<kTileOf<Format>>(this->x, i + kSumAhead, numel);
    prefetch<kTileOf<Format> / kPerByte>(codes, i / kPerByte + kCodesAhead, numel / kPerByte);
  }
};

// The values x[0, numel) of a range. A reduction of floats vectorises only as independent lanes,
// folded at the end.
template <RangedFormat Format, typename T>
struct ContiguousValues {
  const T* __restrict x;
  int64_t count;

  BAGUA_HD int64_t numel() const { return count; }

  template <template <int> typename Statistics, typename... Arguments>
  BAGUA_HD Statistics<1> collect(Arguments... arguments) const {
    constexpr int kLanes = lanes();
    Statistics<kLanes> gathered;
    if constexpr (!ExtentFormat<Format> && Format::kBlockNumel > 0) {
      if (count == Format::kBlockNumel) {
        gather_block<kLanes>(gathered, arguments...);
        fold_at_once<kLanes>(gathered);
        return only(gathered);
      }
    }
    gather<kLanes>(gathered, arguments...);
    fold_lanes<kLanes>(gathered);
    return only(gathered);
  }

 private:
  template <int kLanes, typename Statistics, typename... Arguments>
  BAGUA_HD void gather(Statistics& gathered, Arguments... arguments) const {
    for (int lane = 0; lane < kLanes; ++lane) gathered.start(lane);
    const int64_t whole = count / kLanes * kLanes;
    for (int64_t i = 0; i < whole; i += kLanes) {
      for (int lane = 0; lane < kLanes; ++lane) {
        gathered.take(lane, widen(x[i + lane]), arguments...);
      }
    }
    for (int64_t i = whole; i < count; ++i) {
      gathered.take(static_cast<int>(i - whole), widen(x[i]), arguments...);
    }
  }

  // Likewise for a whole block, a lane at a time: sums stay in registers, of which there are too
  // few for all lanes of several sums.
  template <int kLanes, typename Statistics, typename... Arguments>
  BAGUA_HD void gather_block(Statistics& gathered, Arguments... arguments) const {
    static_assert(Format::kBlockNumel % kLanes == 0);
    constexpr int kRows = static_cast<int>(Format::kBlockNumel) / kLanes;
    for (int lane = 0; lane < kLanes; ++lane) {
      gathered.start(lane);
#pragma GCC unroll 8
      for (int row = 0; row < kRows; ++row) {
        gathered.take(lane, widen(x[row * kLanes + lane]), arguments...);
      }
    }
  }

  // fold_lanes with widths that the compiler knows: twice as fast for sums, slower for extents.
  template <int kLanes, typename Statistics>
  BAGUA_HD static void fold_at_once(Statistics& gathered) {
    if constexpr (kLanes > 1) {
      constexpr int kHalf = kLanes / 2;
      for (int lane = 0; lane < kHalf; ++lane) gathered.join(lane, gathered, lane + kHalf);
      fold_at_once<kHalf>(gathered);
    }
  }

  template <template <int> typename Statistics, int kLanes>
  BAGUA_HD static Statistics<1> only(const Statistics<kLanes>& folded) {
    Statistics<1> all;
    all.start(0);
    all.join(0, folded, 0);
    return all;
  }

  static constexpr int lanes() {
    if constexpr (ExtentFormat<Format>) {
      return Format::kLanes;
    } else {
      return kSumLanes<Format>;
    }
  }
};

// The codes of the range x[0, numel), of a chunk that has `left` elements from x on.
template <RangedFormat Format, typename T>
BAGUA_HD void write_codes(const T* __restrict x, int64_t numel, int64_t left,
                          QuantiserOf<Format> quantiser, uint8_t* __restrict codes) {
  constexpr int kPerByte = kCodesPerByte<Format>;
  constexpr int64_t kTileBytes = kTileOf<Format> / kPerByte;
  const int64_t stride = code_bytes<Format>(numel);
  const int64_t full = std::max<int64_t>(0, numel - (kPerByte - 1) * stride);
  const auto write = [&](int64_t j) __attribute__((always_inline)) {
    uint32_t byte = 0;
    for (int k = 0; k < kPerByte; ++k) {
      byte |= uint32_t{Format::quantise(widen(x[j + k * stride]), quantiser)}
              << (k * Format::kBits);
    }
    codes[j] = static_cast<uint8_t>(byte);
  };
  int64_t j = 0;
  for (; j + kTileBytes <= full; j += kTileBytes) {
    prefetch<kTileOf<Format>>(x, j * kPerByte + kEncodeAhead, left);
    for (int64_t c = j; c < j + kTileBytes; ++c) write(c);
  }
  for (; j < full; ++j) write(j);
  for (; j < stride; ++j) codes[j] = pack_codes<Format>(x, numel, stride, j, quantiser);
}

// The range of `numel` elements that begins at element `begin` of the chunk.
template <RangedFormat Format, typename T>
BAGUA_HD void encode_range(const T* __restrict x, int64_t begin, int64_t numel, int64_t chunk_numel,
                           std::byte* __restrict header, uint8_t* __restrict codes) {
  const EncodingOf<Format, T> found =
      encoding_of<Format, T>(ContiguousValues<Format, T>{x + begin, numel});
  write_header(found.header, header);
  uint8_t* const own = codes + code_bytes<Format>(begin);
  if (found.quantiser.constant) {
    std::memset(own, 0, code_bytes<Format>(numel));
  } else {
    write_codes<Format>(x + begin, numel, chunk_numel - begin, found.quantiser, own);
  }
}

// Likewise.
template <RangedFormat Format, typename T, typename Sink>
BAGUA_HD void decode_range(const std::byte* __restrict header, const uint8_t* __restrict codes,
                           int64_t begin, int64_t numel, int64_t chunk_numel, Sink sink) {
  constexpr int kPerByte = kCodesPerByte<Format>;
  constexpr int64_t kTileBytes = kTileOf<Format> / kPerByte;
  const int64_t stride = code_bytes<Format>(numel);
  const int64_t full = std::max<int64_t>(0, numel - (kPerByte - 1) * stride);
  const uint8_t* __restrict own = codes + code_bytes<Format>(begin);
  const typename Format::Grid grid = Format::grid(read_header<HeaderOf<Format, T>>(header));
  const auto take = [&](int64_t j, int k) __attribute__((always_inline)) {
    sink(begin + k * stride + j,
         Format::template dequantise<T>(unpack_code<Format>(own[j], k), grid));
  };
  int64_t j = 0;
  for (; j + kTileBytes <= full; j += kTileBytes) {
    if constexpr (requires { sink.template prefetch_tile<Format>(codes, j, chunk_numel); }) {
      sink.template prefetch_tile<Format>(codes, begin + j * kPerByte, chunk_numel);
    }
    for (int k = 0; k < kPerByte; ++k) {
      for (int64_t c = j; c < j + kTileBytes; ++c) take(c, k);
    }
  }
  for (int k = 0; k < kPerByte; ++k) {
    const int64_t end = std::min(stride, numel - k * stride);
    for (int64_t c = j; c < end; ++c) take(c, k);
  }
}

// Calls function(begin, numel, number) for each range. The number of elements is a constant for the
// compiler in whole blocks that are too small for loops of any length to be fast.
template <RangedFormat Format, typename Function>
BAGUA_HD void for_each_range(int64_t chunk_numel, Function&& function) {
  if constexpr (Format::kBlockNumel == 0) {
    if (chunk_numel > 0) function(int64_t{0}, chunk_numel, int64_t{0});
  } else {
    constexpr bool kSmall = Format::kBlockNumel <= kTile;
    int64_t number = 0, begin = 0;
    if constexpr (kSmall) {
      for (; begin + Format::kBlockNumel <= chunk_numel; begin += Format::kBlockNumel) {
        function(begin, Format::kBlockNumel, number++);
      }
    }
    for (; begin < chunk_numel; begin += Format::kBlockNumel) {
      function(begin, std::min(Format::kBlockNumel, chunk_numel - begin), number++);
    }
  }
}

// Does nothing with a range that has been encoded.
struct IgnoreRange {
  BAGUA_HD void operator()(const std::byte*, const uint8_t*, int64_t, int64_t) const {}
};

// Calls encoded(header, codes, begin, numel) after each range, with the codes of the chunk.
template <RangedFormat Format, typename T, typename Encoded = IgnoreRange>
BAGUA_HD void encode_chunk(const T* x, int64_t numel, std::byte* __restrict payload,
                           Encoded encoded = {}) {
  constexpr int64_t kHeaderBytes = sizeof(HeaderOf<Format, T>);
  const RangedLayout layout = layout_of<Format, T>(numel);
  uint8_t* __restrict codes = reinterpret_cast<uint8_t*>(payload + layout.codes_offset);
  for_each_range<Format>(
      numel, [&](int64_t begin, int64_t of_range, int64_t number) __attribute__((always_inline)) {
        std::byte* const header = payload + number * kHeaderBytes;
        encode_range<Format>(x, begin, of_range, numel, header, codes);
        encoded(header, codes, begin, of_range);
      });
  const int64_t headers_bytes = numel == 0 ? 0 : layout.headers_bytes;
  std::memset(payload + headers_bytes, 0, layout.codes_offset - headers_bytes);
  std::memset(codes + layout.codes_bytes, 0,
              layout.payload_bytes - layout.codes_offset - layout.codes_bytes);
}

template <RangedFormat Format, typename T, typename Sink>
BAGUA_HD void decode_chunk(const std::byte* __restrict payload, int64_t numel, Sink sink) {
  constexpr int64_t kHeaderBytes = sizeof(HeaderOf<Format, T>);
  const RangedLayout layout = layout_of<Format, T>(numel);
  const uint8_t* __restrict codes = reinterpret_cast<const uint8_t*>(payload + layout.codes_offset);
  for_each_range<Format>(numel, [&](int64_t begin, int64_t of_range,
                                    int64_t number) __attribute__((always_inline)) {
    decode_range<Format, T>(payload + number * kHeaderBytes, codes, begin, of_range, numel, sink);
  });
}

template <CastFormat Format, typename T>
BAGUA_HD void encode_chunk(const T* __restrict x, int64_t numel, std::byte* __restrict payload) {
  using Code = typename Format::Code;
  Code* __restrict codes = reinterpret_cast<Code*>(payload);
  for (int64_t i = 0; i < numel; ++i) codes[i] = Format::quantise(widen(x[i]));
  const int64_t bytes = numel * static_cast<int64_t>(sizeof(Code));
  std::memset(payload + bytes, 0, align_payload(bytes) - bytes);
}

template <CastFormat Format, typename T, typename Sink>
BAGUA_HD void decode_chunk(const std::byte* __restrict payload, int64_t numel, Sink sink) {
  using Code = typename Format::Code;
  const Code* __restrict codes = reinterpret_cast<const Code*>(payload);
  for (int64_t i = 0; i < numel; ++i) sink(i, Format::template dequantise<T>(codes[i]));
}

}  // namespace bagua
