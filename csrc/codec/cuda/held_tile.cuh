// A whole tile in the registers of a warp, for any format.
//
// A lane holds kRanges ranges, or its share of them; of each range kVectors vectors of kNumel
// neighbouring elements, and their codes in kPacked groups of words. Where blocks are smaller than
// a tile, the lane's codes of a range are one group (block_kernels.cuh). Where a tile has no
// ranges, as of casts, few vectors at a time need few registers.
#pragma once

#include "base/device.h"
#include "codec/chunk_parts.h"
#include "codec/cuda/block_kernels.cuh"
#include "codec/cuda/range_kernels.cuh"
#include "codec/cuda/sinks.cuh"
#include "codec/cuda/tile.cuh"
#include "codec/exact_division.h"

namespace bagua {

// A format whose ranges are at most a tile, or that has none.
template <typename Format>
concept TiledFormat = CastFormat<Format> || BlockedFormat<Format> ||
                      (RangedFormat<Format> && Format::kBlockNumel == kTileNumel);
template <typename Format>
concept HeldFormat = TiledFormat<Format> || ChunkRangedFormat<Format>;

// Header of a range and encoder of its values.
template <typename Format, typename T>
struct RangeCoder;

template <RangedFormat Format, typename T>
struct RangeCoder<Format, T> : EncodingOf<Format, T> {
  BAGUA_DEVICE uint8_t code(float value) const {
    return this->quantiser.constant ? uint8_t{0} : Format::quantise(value, this->quantiser);
  }
};

template <CastFormat Format, typename T>
struct RangeCoder<Format, T> {
  struct Header {
  } header;
  BAGUA_DEVICE typename Format::Code code(float value) const { return Format::quantise(value); }
};

// The coder of a range, from `values` as Note [Formats] has them.
template <typename Format, typename T, typename Values>
BAGUA_DEVICE RangeCoder<Format, T> coder_of(const Values& values) {
  if constexpr (RangedFormat<Format>) {
    return {encoding_of<Format, T>(values)};
  } else {
    return {};
  }
}

// Decoder of the codes of a range. plain() takes any code where is_plain() holds, all() always.
template <typename Format, typename T>
struct CodeBook;

template <RangedFormat Format, typename T>
struct CodeBook<Format, T> {
  using Code = uint8_t;
  using Header = HeaderOf<Format, T>;
  typename Format::Grid grid;
  PlainDequantiser<Format, T> dequantiser;

  BAGUA_DEVICE explicit CodeBook(Header header) : grid(Format::grid(header)), dequantiser(grid) {}
  BAGUA_DEVICE bool is_plain() const { return dequantiser.plain; }
  BAGUA_DEVICE T plain(Code code) const { return with_quiet_nan(dequantiser(code)); }
  BAGUA_DEVICE T all(Code code) const {
    return with_quiet_nan(Format::template dequantise<T>(code, grid));
  }
};

template <CastFormat Format, typename T>
struct CodeBook<Format, T> {
  using Code = typename Format::Code;
  using Header = typename RangeCoder<Format, T>::Header;

  BAGUA_DEVICE explicit CodeBook(Header) {}
  BAGUA_DEVICE bool is_plain() const { return true; }
  BAGUA_DEVICE T plain(Code code) const {
    return with_quiet_nan(Format::template dequantise<T>(code));
  }
  BAGUA_DEVICE T all(Code code) const { return plain(code); }
};

// Places of a lane's elements and codes in a tile.
template <HeldFormat Format, typename T, int kVectorNumel>
struct TileMap {
  using Code = typename CodeBook<Format, T>::Code;
  static constexpr int kNumel = kVectorNumel;
  static constexpr int kVectors = CastFormat<Format>          ? 4
                                  : ChunkRangedFormat<Format> ? 32 / kNumel
                                                              : kTileNumel / (kWarpLanes * kNumel);
  static constexpr int kRanges = kTileNumel / (kWarpLanes * kNumel * kVectors);
  static constexpr int kLanesOfRange = kWarpLanes;
  static constexpr int kPacked = kVectors;
  static constexpr int kWords = kNumel * static_cast<int>(sizeof(Code)) / 4;  // of a group

  BAGUA_DEVICE static int range(int) { return 0; }
  BAGUA_DEVICE static bool is_first_of_range() { return lane_index() == 0; }
  BAGUA_DEVICE static int element(int r, int vector) {
    return ((r * kVectors + vector) * kWarpLanes + lane_index()) * kNumel;
  }
  BAGUA_DEVICE static int code_byte(int r, int group) {
    return element(r, group) * static_cast<int>(sizeof(Code));
  }
  BAGUA_DEVICE static int group_of(int vector) { return vector; }
  BAGUA_DEVICE static Code get(const Words<kWords>& group, int, int k) {
    return element_of<Code>(group, k);
  }
  BAGUA_DEVICE static void put(Words<kWords>& group, int, int k, Code code) {
    put_element(group, k, code);
  }
};

template <BlockedFormat Format, typename T, int kVectorNumel>
struct TileMap<Format, T, kVectorNumel> {
  using Lanes = BlockLanes<Format, kVectorNumel>;
  using Code = uint8_t;
  static constexpr int kNumel = kVectorNumel;
  static constexpr int kRanges = Lanes::kRounds;
  static constexpr int kVectors = Lanes::kPerByte;
  static constexpr int kLanesOfRange = Lanes::kLanes;
  static constexpr int kPacked = 1;
  static constexpr int kWords = kNumel / 4;

  BAGUA_DEVICE static int range(int r) { return Lanes::block(r); }
  BAGUA_DEVICE static bool is_first_of_range() { return Lanes::is_first(); }
  BAGUA_DEVICE static int element(int r, int vector) {
    return Lanes::block(r) * Lanes::kNumel + vector * Lanes::kStride + Lanes::byte();
  }
  BAGUA_DEVICE static int code_byte(int r, int) {
    return Lanes::block(r) * Lanes::kStride + Lanes::byte();
  }
  BAGUA_DEVICE static int group_of(int) { return 0; }
  BAGUA_DEVICE static Code get(const Words<kWords>& group, int vector, int k) {
    return unpack_code<Format>(element_of<uint8_t>(group, k), vector);
  }
  BAGUA_DEVICE static void put(Words<kWords>& group, int vector, int k, Code code) {
    put_element(group, k, static_cast<uint8_t>(code << (vector * Format::kBits)));
  }
};

// Where the sections of a tile begin in its chunk's payload, in bytes. T: what was encoded.
template <HeldFormat Format, typename T>
struct TileSections {
  int64_t headers;
  int64_t codes;

  BAGUA_DEVICE explicit TileSections(const Tile& tile) {
    if constexpr (RangedFormat<Format>) {
      headers = 0;
      if constexpr (BlockFormat<Format>) {
        headers = tile.first / Format::kBlockNumel * sizeof(HeaderOf<Format, T>);
      }
      codes =
          layout_of<Format, T>(tile.chunk.numel).codes_offset + tile.first / kCodesPerByte<Format>;
    } else {
      headers = 0;
      codes = tile.first * sizeof(typename Format::Code);
    }
  }

  BAGUA_DEVICE auto header(const std::byte* payload, int range) const {
    using Header = typename CodeBook<Format, T>::Header;
    if constexpr (RangedFormat<Format>) {
      return read_header<Header>(payload + headers + range * sizeof(Header));
    } else {
      return Header{};
    }
  }
};

// The codes that a lane holds of one range.
template <typename Map>
struct PackedRange {
  Words<Map::kWords> groups[Map::kPacked];

  BAGUA_DEVICE static PackedRange load(const std::byte* codes, int r) {
    PackedRange packed;
    BAGUA_UNROLL
    for (int g = 0; g < Map::kPacked; ++g) {
      packed.groups[g] = load_words<Map::kWords>(codes + Map::code_byte(r, g));
    }
    return packed;
  }
  BAGUA_DEVICE void store(std::byte* codes, int r) const {
    BAGUA_UNROLL
    for (int g = 0; g < Map::kPacked; ++g) {
      store_words(codes + Map::code_byte(r, g), groups[g]);
    }
  }
  // Calls function(vector, k, value) for each decoded element.
  template <typename Book, typename Function>
  BAGUA_DEVICE void decode(const Book& book, Function function) const {
    if (book.is_plain()) {
      for_each([&](int v, int k, typename Map::Code code) { function(v, k, book.plain(code)); });
    } else {
      for_each([&](int v, int k, typename Map::Code code) { function(v, k, book.all(code)); });
    }
  }

 private:
  template <typename Function>
  BAGUA_DEVICE void for_each(Function function) const {
    BAGUA_UNROLL
    for (int v = 0; v < Map::kVectors; ++v) {
      BAGUA_UNROLL
      for (int k = 0; k < Map::kNumel; ++k)
        function(v, k, Map::get(groups[Map::group_of(v)], v, k));
    }
  }
};

// The elements that a lane holds of one range.
template <typename Map>
struct RangeValues {
  float of[Map::kVectors][Map::kNumel];

  template <typename T>
  BAGUA_DEVICE static RangeValues load(const T* x, int r) {
    RangeValues values;
    BAGUA_UNROLL
    for (int v = 0; v < Map::kVectors; ++v) {
      const auto vector = load_words<Map::kNumel * sizeof(T) / 4>(x + Map::element(r, v));
      BAGUA_UNROLL
      for (int k = 0; k < Map::kNumel; ++k) values.of[v][k] = widen(element_of<T>(vector, k));
    }
    return values;
  }

  // Calls function(vector, k, value) for each element.
  template <typename Function>
  BAGUA_DEVICE void for_each(Function function) const {
    BAGUA_UNROLL
    for (int v = 0; v < Map::kVectors; ++v) {
      BAGUA_UNROLL
      for (int k = 0; k < Map::kNumel; ++k) function(v, k, of[v][k]);
    }
  }

  // The coder of the range, the same in all of its lanes, for elements of T. All lanes of the warp
  // call it.
  template <typename Format, typename T>
  BAGUA_DEVICE RangeCoder<Format, T> coder() const {
    return coder_of<Format, T>(InRegisters<Format>{*this});
  }

  template <typename Coder>
  BAGUA_DEVICE PackedRange<Map> quantised(const Coder& coder) const {
    PackedRange<Map> packed{};
    BAGUA_UNROLL
    for (int v = 0; v < Map::kVectors; ++v) {
      BAGUA_UNROLL
      for (int k = 0; k < Map::kNumel; ++k) {
        Map::put(packed.groups[Map::group_of(v)], v, k, coder.code(of[v][k]));
      }
    }
    return packed;
  }

 private:
  template <typename Format>
  struct InRegisters {
    const RangeValues& values;

    BAGUA_DEVICE int64_t numel() const { return Format::kBlockNumel; }

    template <template <int> typename Statistics, typename... Arguments>
    BAGUA_DEVICE Statistics<1> collect(Arguments... arguments) const {
      return collect_neighbours<Format, Statistics, Map::kVectors, Map::kNumel, Map::kLanesOfRange>(
          [&](int v, int k) { return values.of[v][k]; }, arguments...);
    }
  };
};

// Whether an address is a multiple of 16 bytes, as vectors ask.
BAGUA_DEVICE bool is_aligned(const void* address) {
  return reinterpret_cast<uintptr_t>(address) % kVectorBytes == 0;
}

// Writes the header of a range from one of its lanes.
template <typename Map, typename Header>
BAGUA_DEVICE void store_header(Header header, std::byte* headers, int r) {
  if constexpr (sizeof(Header) > 1) {
    if (Map::is_first_of_range()) write_header(header, headers + Map::range(r) * sizeof(Header));
  }
}

// Zeros behind the sections of a chunk's payload; by the warp of its last tile. T: what was
// encoded.
template <TiledFormat Format, typename T>
BAGUA_DEVICE void clear_padding_of(const Tile& tile) {
  if (!tile.is_last()) return;
  const Chunk& chunk = tile.chunk;
  if constexpr (RangedFormat<Format>) {
    clear_padding(chunk, layout_of<Format, T>(chunk.numel));
  } else {
    const int64_t bytes = chunk.numel * static_cast<int64_t>(sizeof(typename Format::Code));
    clear_bytes(chunk.payload + bytes, chunk.payload + align_payload(bytes));
  }
}

}  // namespace bagua
