// Decoding on the device: the payload is read once, and x written once (decode) or read and written
// once (decode_add).
#pragma once

#include "base/launch.h"
#include "codec/chunk_batch.h"
#include "codec/chunk_parts.h"
#include "codec/cuda/block_kernels.cuh"
#include "codec/cuda/encode_kernels.cuh"
#include "codec/cuda/sinks.cuh"
#include "codec/cuda/tile.cuh"
#include "codec/exact_division.h"

namespace bagua {

// The codes of a tile as elements. all() takes any code; plain() only codes for which is_plain
// holds.
template <typename Format, typename T>
struct TileDecoder;

template <RangedFormat Format, typename T>
struct TileDecoder<Format, T> {
  using Code = uint8_t;
  using Header = HeaderOf<Format, T>;
  typename Format::Grid grid;
  PlainDequantiser<Format, T> dequantiser;

  BAGUA_DEVICE static int64_t codes_offset(int64_t numel) {
    return layout_of<Format, T>(numel).codes_offset;
  }
  BAGUA_DEVICE explicit TileDecoder(const Tile& tile)
      : grid(Format::grid(read_header<Header>(
            tile.chunk.payload + (Format::kBlockNumel == 0 ? 0 : tile.index * sizeof(Header))))),
        dequantiser(grid) {}
  BAGUA_DEVICE bool is_plain() const { return dequantiser.plain; }
  BAGUA_DEVICE T plain(Code code) const { return dequantiser(code); }
  BAGUA_DEVICE T all(Code code) const {
    return with_quiet_nan(Format::template dequantise<T>(code, grid));
  }
};

template <CastFormat Format, typename T>
struct TileDecoder<Format, T> {
  using Code = typename Format::Code;

  BAGUA_DEVICE static int64_t codes_offset(int64_t) { return 0; }
  BAGUA_DEVICE explicit TileDecoder(const Tile&) {}
  BAGUA_DEVICE bool is_plain() const { return true; }
  BAGUA_DEVICE T plain(Code code) const {
    return with_quiet_nan(Format::template dequantise<T>(code));
  }
  BAGUA_DEVICE T all(Code code) const { return plain(code); }
};

template <typename Decoder, typename Sink>
BAGUA_DEVICE void decode_tile(const Tile& tile, Sink sink) {
  using Code = typename Decoder::Code;
  constexpr int kPerVector = Sink::kPerVector;
  using Mine = LaneVectors<kPerVector>;
  const Code* const codes =
      reinterpret_cast<const Code*>(tile.chunk.payload + Decoder::codes_offset(tile.chunk.numel)) +
      tile.first;
  const Code* const my_codes = codes + Mine::begin();
  sink.x += tile.first;
  auto* const mine = sink.x + Mine::begin();
  int whole = tile.whole_vectors<kPerVector, kPerVector * sizeof(Code)>();
  const int left = whole - Mine::begin();

  // 1. All loads.
  Words<kPerVector * sizeof(Code) / 4> packed[Mine::kCount]{};
  Words<4> vectors[Mine::kCount]{};
  BAGUA_UNROLL
  for (int j = 0; j < Mine::kCount; ++j) {
    if (j * Mine::kStep >= left) continue;
    packed[j] = load_words<kPerVector * sizeof(Code) / 4>(my_codes + j * Mine::kStep);
    if constexpr (Sink::kReads) vectors[j] = load_words<4>(mine + j * Mine::kStep);
  }
  const Decoder decoder(tile);

  // 2. Vectors, or everything one by one where the decoder's fast way does not do.
  if (decoder.is_plain()) {
    BAGUA_UNROLL
    for (int j = 0; j < Mine::kCount; ++j) {
      BAGUA_UNROLL
      for (int k = 0; k < kPerVector; ++k) {
        sink.put(vectors[j], k, decoder.plain(element_of<Code>(packed[j], k)));
      }
      if (j * Mine::kStep < left) store_words(mine + j * Mine::kStep, vectors[j]);
    }
  } else {
    if constexpr (Sink::kReads) __syncwarp();  // what step 1 has read is written by other lanes now
    whole = 0;
  }
  for (int i = whole + lane_index(); i < tile.numel; i += kWarpLanes) {
    sink(i, decoder.all(codes[i]));
  }
}

template <typename Format, typename T, typename Sink>
BAGUA_DEVICE void decode_tile_of(const Tile& tile, Sink sink) {
  if constexpr (BlockedFormat<Format>) {
    decode_blocks<Format, T>(tile, sink);
  } else {
    decode_tile<TileDecoder<Format, T>>(tile, sink);
  }
}

// Units are tiles; a warp has one.
template <typename Format, typename T>
__global__ void __launch_bounds__(kTileThreads)
    decode_tiles(const __grid_constant__ ChunkBatch batch) {
  const int64_t unit = int64_t{blockIdx.x} * kTileWarps + warp_index();
  if (unit >= batch.units()) return;
  const int index = batch.chunk_of(unit);
  const Tile tile(batch.chunks[index], unit - batch.first_unit[index]);
  decode_tile_of<Format, T>(tile, StoreVectors<T>{{static_cast<T*>(tile.chunk.x)}});
}

template <typename Format, typename T>
__global__ void __launch_bounds__(kTileThreads)
    decode_add_tiles(const __grid_constant__ ChunkBatch batch, float weight) {
  const int64_t unit = int64_t{blockIdx.x} * kTileWarps + warp_index();
  if (unit >= batch.units()) return;
  const int index = batch.chunk_of(unit);
  const Tile tile(batch.chunks[index], unit - batch.first_unit[index]);
  decode_tile_of<Format, T>(tile,
                            AddWeightedVectors<T>{{static_cast<float*>(tile.chunk.x), weight}});
}

}  // namespace bagua
