// Formats whose blocks are smaller than a tile: a warp encodes and decodes the blocks of its tile.
//
// A block is a power of two of elements; its codes take kStride bytes, and byte j holds the
// elements j, j + kStride, ... (Note [Formats]). A lane has as many neighbouring bytes as a vector
// of 16 bytes has elements, so that it reads one vector at each multiple of kStride, and packs them
// without asking other lanes. Neighbouring lanes have neighbouring vectors: each access of the warp
// is runs of consecutive bytes, of codes one run. As in tile.cuh all loads come before the first
// use.
#pragma once

#include "base/device.h"
#include "codec/chunk_parts.h"
#include "codec/cuda/range_kernels.cuh"
#include "codec/cuda/sinks.cuh"
#include "codec/cuda/tile.cuh"

namespace bagua {

template <typename Format>
concept BlockedFormat =
    RangedFormat<Format> && (Format::kBlockNumel > 0 && Format::kBlockNumel < kTileNumel);

// Bytes of blocks that belong to a lane: in round r those from byte() on of block r * kBlocks +
// block().
template <BlockedFormat Format, int kPerVector>
struct BlockLanes {
  static constexpr int kPerByte = kCodesPerByte<Format>;
  static constexpr int kNumel = static_cast<int>(Format::kBlockNumel);
  static constexpr int kStride = kNumel / kPerByte;
  static constexpr int kLanes = kStride / kPerVector;  // of a block
  static constexpr int kBlocks = kWarpLanes / kLanes;
  static constexpr int kRounds = kTileNumel / (kBlocks * kNumel);
  static_assert((kNumel & (kNumel - 1)) == 0 && kLanes >= 1 && kLanes <= kWarpLanes &&
                kRounds >= 1);

  BAGUA_DEVICE static int block(int round) { return round * kBlocks + lane_index() / kLanes; }
  BAGUA_DEVICE static int byte() { return lane_index() % kLanes * kPerVector; }
  BAGUA_DEVICE static bool is_first() { return lane_index() % kLanes == 0; }
};

// The sections of a tile's payload.
template <BlockedFormat Format, typename T>
struct BlockSections {
  std::byte* headers;
  uint8_t* codes;

  BAGUA_DEVICE BlockSections(const Tile& tile, const RangedLayout& layout)
      : headers(tile.chunk.payload + tile.first / Format::kBlockNumel * kHeaderBytes),
        codes(reinterpret_cast<uint8_t*>(tile.chunk.payload + layout.codes_offset) +
              tile.first / kCodesPerByte<Format>) {}

  BAGUA_DEVICE std::byte* header(int block) const { return headers + block * kHeaderBytes; }
  BAGUA_DEVICE uint8_t* codes_of(int block) const {
    return codes + block * (Format::kBlockNumel / kCodesPerByte<Format>);
  }

 private:
  static constexpr int kHeaderBytes = sizeof(HeaderOf<Format, T>);
};

// A block x[0, numel) of any size or alignment, encoded as elements of T by all lanes of the warp.
template <RangedFormat Format, typename T, typename Values>
BAGUA_DEVICE void encode_block(const Values& x, int numel, std::byte* header_at, uint8_t* codes) {
  const auto found = encoding_of<Format, T>(ElementValues<Format, Values>{x, numel});
  if (lane_index() == 0) write_header(found.header, header_at);
  const int stride = static_cast<int>(code_bytes<Format>(numel));
  for (int j = lane_index(); j < stride; j += kWarpLanes) {
    codes[j] = found.quantiser.constant ? uint8_t{0}
                                        : pack_codes<Format>(x, numel, stride, j, found.quantiser);
  }
}

// A lane's share of a block, vectors[v] of kPerVector elements each, as values of the block.
template <BlockedFormat Format, typename T>
struct VectorValues {
  static constexpr int kPerVector = kVectorBytes / sizeof(T);
  using Mine = BlockLanes<Format, kPerVector>;
  const Words<4> (&vectors)[Mine::kPerByte];

  BAGUA_DEVICE int64_t numel() const { return Mine::kNumel; }

  template <template <int> typename Statistics, typename... Arguments>
  BAGUA_DEVICE Statistics<1> collect(Arguments... arguments) const {
    return collect_neighbours<Format, Statistics, Mine::kPerByte, kPerVector, Mine::kLanes>(
        [&](int v, int k) { return widen(element_of<T>(vectors[v], k)); }, arguments...);
  }
};

template <BlockedFormat Format, typename T>
BAGUA_DEVICE void encode_blocks(const Tile& tile) {
  constexpr int kPerVector = kVectorBytes / sizeof(T);
  using Mine = BlockLanes<Format, kPerVector>;
  const RangedLayout layout = layout_of<Format, T>(tile.chunk.numel);
  const BlockSections<Format, T> sections(tile, layout);
  const T* const x = static_cast<const T*>(tile.chunk.x) + tile.first;
  const int whole = tile.whole_vectors<kPerVector, kPerVector>() / Mine::kNumel;

  // 1. All loads.
  Words<4> vectors[Mine::kRounds][Mine::kPerByte]{};
  BAGUA_UNROLL
  for (int r = 0; r < Mine::kRounds; ++r) {
    if (Mine::block(r) >= whole) continue;
    const T* const mine = x + Mine::block(r) * Mine::kNumel + Mine::byte();
    BAGUA_UNROLL
    for (int k = 0; k < Mine::kPerByte; ++k) {
      vectors[r][k] = load_words<4>(mine + k * Mine::kStride);
    }
  }

  // 2. Whole blocks. Lanes beyond them have zeros, and write nothing.
  BAGUA_UNROLL
  for (int r = 0; r < Mine::kRounds; ++r) {
    const auto found = encoding_of<Format, T>(VectorValues<Format, T>{vectors[r]});
    Words<kPerVector / 4> packed{};
    if (!found.quantiser.constant) {
      BAGUA_UNROLL
      for (int i = 0; i < kPerVector; ++i) {
        uint32_t byte = 0;
        BAGUA_UNROLL
        for (int k = 0; k < Mine::kPerByte; ++k) {
          const float value = widen(element_of<T>(vectors[r][k], i));
          byte |= uint32_t{Format::quantise(value, found.quantiser)} << (k * Format::kBits);
        }
        put_element(packed, i, static_cast<uint8_t>(byte));
      }
    }
    const int block = Mine::block(r);
    if (block >= whole) continue;
    if (Mine::is_first()) write_header(found.header, sections.header(block));
    store_words(sections.codes_of(block) + Mine::byte(), packed);
  }

  // 3. The others.
  for (int block = whole; block * Mine::kNumel < tile.numel; ++block) {
    const int first = block * Mine::kNumel;
    const int left = tile.numel - first;
    encode_block<Format, T>(x + first, left < Mine::kNumel ? left : Mine::kNumel,
                            sections.header(block), sections.codes_of(block));
  }
  if (tile.is_last()) clear_padding(tile.chunk, layout);
}

// Likewise: a block of any size or alignment, by all lanes of the warp.
template <BlockedFormat Format, typename T, typename Sink>
BAGUA_DEVICE void decode_block(const std::byte* header, const uint8_t* codes, int numel,
                               Sink sink) {
  const typename Format::Grid grid = Format::grid(read_header<HeaderOf<Format, T>>(header));
  const int stride = static_cast<int>(code_bytes<Format>(numel));
  for (int j = lane_index(); j < stride; j += kWarpLanes) {
    for (int k = 0; k < kCodesPerByte<Format>; ++k) {
      const int i = j + k * stride;
      if (i >= numel) break;
      const uint8_t code = unpack_code<Format>(codes[j], k);
      sink(i, with_quiet_nan(Format::template dequantise<T>(code, grid)));
    }
  }
}

template <BlockedFormat Format, typename T, typename Sink>
BAGUA_DEVICE void decode_blocks(const Tile& tile, Sink sink) {
  constexpr int kPerVector = Sink::kPerVector;
  using Mine = BlockLanes<Format, kPerVector>;
  const RangedLayout layout = layout_of<Format, T>(tile.chunk.numel);
  const BlockSections<Format, T> sections(tile, layout);
  sink.x += tile.first;
  const int whole = tile.whole_vectors<kPerVector, kPerVector>() / Mine::kNumel;

  // 1. All loads.
  Words<kPerVector / 4> packed[Mine::kRounds]{};
  HeaderOf<Format, T> headers[Mine::kRounds]{};
  Words<4> vectors[Mine::kRounds][Mine::kPerByte]{};
  BAGUA_UNROLL
  for (int r = 0; r < Mine::kRounds; ++r) {
    const int block = Mine::block(r);
    if (block >= whole) continue;
    packed[r] = load_words<kPerVector / 4>(sections.codes_of(block) + Mine::byte());
    headers[r] = read_header<HeaderOf<Format, T>>(sections.header(block));
    if constexpr (Sink::kReads) {
      BAGUA_UNROLL
      for (int k = 0; k < Mine::kPerByte; ++k) {
        vectors[r][k] =
            load_words<4>(sink.x + block * Mine::kNumel + k * Mine::kStride + Mine::byte());
      }
    }
  }

  // 2. Whole blocks.
  BAGUA_UNROLL
  for (int r = 0; r < Mine::kRounds; ++r) {
    const int block = Mine::block(r);
    const typename Format::Grid grid = Format::grid(headers[r]);
    BAGUA_UNROLL
    for (int k = 0; k < Mine::kPerByte; ++k) {
      BAGUA_UNROLL
      for (int i = 0; i < kPerVector; ++i) {
        const uint8_t code = unpack_code<Format>(element_of<uint8_t>(packed[r], i), k);
        sink.put(vectors[r][k], i, with_quiet_nan(Format::template dequantise<T>(code, grid)));
      }
      if (block < whole) {
        store_words(sink.x + block * Mine::kNumel + k * Mine::kStride + Mine::byte(),
                    vectors[r][k]);
      }
    }
  }

  // 3. The others.
  for (int block = whole; block * Mine::kNumel < tile.numel; ++block) {
    const int first = block * Mine::kNumel;
    const int left = tile.numel - first;
    Sink here = sink;
    here.x += first;
    decode_block<Format, T>(sections.header(block), sections.codes_of(block),
                            left < Mine::kNumel ? left : Mine::kNumel, here);
  }
}

}  // namespace bagua
