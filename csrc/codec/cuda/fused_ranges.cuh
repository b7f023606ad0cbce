// Rows of payloads, and ranges of a tile element by element: what the kernels of FusedCodec share.
//
// A warp has a tile: in registers where the tile is whole and everything is aligned, else element
// by element.
#pragma once

#include "base/device.h"
#include "codec/cuda/encode_kernels.cuh"
#include "codec/cuda/held_tile.cuh"
#include "codec/fused_codec.h"

namespace bagua {

// CTAs per multiprocessor that leave a lane the registers for its share of a tile and for what is
// added to it: one row of payloads, or as many vectors of four arrays as the compiler loads ahead.
// With 3 some formats spill.
constexpr int kTileCtasOfSums = 2;

// Elements of x and f32 elements in one vector of a lane.
template <typename T>
inline constexpr int kOwnVector = kVectorBytes / sizeof(T);
constexpr int kFloatVector = kVectorBytes / sizeof(float);

// The residual of an element, with the bits of decode_add.
BAGUA_DEVICE float lost_of(float x, float decoded) { return add_weighted(x, -1.0f, decoded); }

// Where a chunk's payload lies in another row than the one that begins at `own_row`.
BAGUA_DEVICE const std::byte* in_row(const std::byte* row, const Chunk& chunk,
                                     const std::byte* own_row) {
  return row + (chunk.payload - own_row);
}

// Whether vectors of a chunk are aligned in x, in its payload and in all versions.
BAGUA_DEVICE bool are_aligned(const Chunk& chunk, const PayloadVersions& versions) {
  return is_aligned(chunk.x) && is_aligned(chunk.payload) &&
         is_aligned(in_row(versions.first, chunk, versions.results)) &&
         versions.stride % kVectorBytes == 0;
}

// Calls function(first, numel, range) for the ranges of a tile, one after the other; once where
// there are none in it.
template <HeldFormat Format, typename Function>
BAGUA_DEVICE void for_each_range_of(const Tile& tile, Function function) {
  constexpr int kRangeNumel =
      BlockFormat<Format> ? static_cast<int>(Format::kBlockNumel) : kTileNumel;
  for (int first = 0; first < tile.numel; first += kRangeNumel) {
    const int left = tile.numel - first;
    function(first, left < kRangeNumel ? left : kRangeNumel, first / kRangeNumel);
  }
}

// One range of a payload, element by element. T: what was encoded.
template <HeldFormat Format, typename T>
struct RangeReader {
  using Book = CodeBook<Format, T>;
  const std::byte* codes;
  int stride;
  Book book;

  BAGUA_DEVICE RangeReader(const TileSections<Format, T>& sections, const std::byte* payload,
                           int first, int numel, int range)
      : codes(codes_at(sections, payload, first)),
        stride(stride_of(numel)),
        book(sections.header(payload, range)) {}

  BAGUA_DEVICE static int stride_of(int numel) {
    if constexpr (RangedFormat<Format>) return static_cast<int>(code_bytes<Format>(numel));
    return numel;
  }
  template <typename Byte>
  BAGUA_DEVICE static Byte* codes_at(const TileSections<Format, T>& sections, Byte* payload,
                                     int first) {
    if constexpr (RangedFormat<Format>) {
      return payload + sections.codes + first / kCodesPerByte<Format>;
    } else {
      return payload + sections.codes + first * static_cast<int>(sizeof(typename Book::Code));
    }
  }

  BAGUA_DEVICE T operator[](int i) const {
    if constexpr (RangedFormat<Format>) {
      const auto byte = static_cast<uint32_t>(codes[i % stride]);
      return book.all(unpack_code<Format>(byte, i / stride));
    } else {
      return book.all(reinterpret_cast<const typename Book::Code*>(codes)[i]);
    }
  }
};

// Encodes a range of any size or alignment, x[i] each; by all lanes of the warp.
template <TiledFormat Format, typename T, typename Values>
BAGUA_DEVICE void encode_range_of(const Values& x, int numel,
                                  const TileSections<Format, T>& sections, std::byte* payload,
                                  int first, int range) {
  std::byte* const codes = RangeReader<Format, T>::codes_at(sections, payload, first);
  if constexpr (RangedFormat<Format>) {
    std::byte* const header = payload + sections.headers + range * sizeof(HeaderOf<Format, T>);
    encode_block<Format, T>(x, numel, header, reinterpret_cast<uint8_t*>(codes));
  } else {
    using Code = typename Format::Code;
    for (int i = lane_index(); i < numel; i += kWarpLanes) {
      reinterpret_cast<Code*>(codes)[i] = Format::quantise(widen(x[i]));
    }
  }
}

}  // namespace bagua
