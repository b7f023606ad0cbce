// Encoding on the device: x is read once (twice where a range is a whole chunk, see
// range_kernels.cuh) and the payload written once, in full.
#pragma once

#include "base/device.h"
#include "codec/chunk_batch.h"
#include "codec/chunk_parts.h"
#include "codec/cuda/block_kernels.cuh"
#include "codec/cuda/range_kernels.cuh"
#include "codec/cuda/tile.cuh"

namespace bagua {

constexpr int kTileWarps = 4;
constexpr int kTileThreads = kTileWarps * kWarpLanes;
// CTAs of encode_tiles per multiprocessor. Left alone the compiler aims at more, and spills.
constexpr int kTileCtas = 4;

// Calls function(batch, CTAs) for the tiles of all chunks, a warp each.
template <typename Function>
void for_each_tile_batch(std::span<const Chunk> chunks, Function function) {
  for_each_batch(chunks, tiles_of, [&](const ChunkBatch& batch) {
    function(batch, (batch.units() + kTileWarps - 1) / kTileWarps);
  });
}

// A tile's codes, encode(value) each. `values` holds the elements before `whole`.
template <typename T, typename Code, typename Encoder>
BAGUA_DEVICE void encode_tile(const TileValues<T>& values, const T* x, int whole, int numel,
                              Code* codes, Encoder encode) {
  constexpr int kPerVector = TileValues<T>::kPerVector;
  using Mine = LaneVectors<kPerVector>;
  Code* const mine = codes + Mine::begin();
  const int left = whole - Mine::begin();
  BAGUA_UNROLL
  for (int j = 0; j < Mine::kCount; ++j) {
    Words<kPerVector * sizeof(Code) / 4> packed{};
    BAGUA_UNROLL
    for (int k = 0; k < kPerVector; ++k) put_element(packed, k, encode(values.value(j, k)));
    if (j * Mine::kStep < left) store_words(mine + j * Mine::kStep, packed);
  }
  for (int i = whole + lane_index(); i < numel; i += kWarpLanes) codes[i] = encode(widen(x[i]));
}

// The codes of a tile whose range is known. Codes are zero where all values decode alike.
template <RangedFormat Format, typename T>
BAGUA_DEVICE void quantise_tile(const TileValues<T>& values, const T* x, int whole, int numel,
                                uint8_t* codes, typename Format::Grid grid) {
  static_assert(Format::kBits == 8);
  if (grid.constant) {
    encode_tile(values, x, whole, numel, codes, [](float) { return uint8_t{0}; });
  } else {
    encode_tile(values, x, whole, numel, codes,
                [=](float value) { return Format::quantise(value, grid); });
  }
}

// Units are tiles; a warp has one. A tile is a block with a separate range.
template <RangedFormat Format, typename T>
BAGUA_DEVICE void encode_tile_of(const Tile& tile) {
  static_assert(Format::kBlockNumel == kTileNumel);
  constexpr int kPerVector = TileValues<T>::kPerVector;
  const T* x = static_cast<const T*>(tile.chunk.x) + tile.first;
  const int whole = tile.whole_vectors<kPerVector, kPerVector>();
  TileValues<T> values;
  values.load(x, whole);
  ExtentOf<Format> extent = empty_extent<Format>();
  values.extend(extent, x, whole, tile.numel);
  const auto header = Format::template header<T>(join_lanes(extent));

  const RangedLayout layout = layout_of<Format, T>(tile.chunk.numel);
  std::byte* codes = tile.chunk.payload + layout.codes_offset + tile.first;
  if (lane_index() == 0) write_header(header, tile.chunk.payload + tile.index * sizeof(header));
  quantise_tile<Format>(values, x, whole, tile.numel, reinterpret_cast<uint8_t*>(codes),
                        Format::grid(header));
  if (tile.is_last()) clear_padding(tile.chunk, layout);
}

// Units are tiles; a warp has one. A tile is several blocks.
template <BlockedFormat Format, typename T>
BAGUA_DEVICE void encode_tile_of(const Tile& tile) {
  encode_blocks<Format, T>(tile);
}

template <CastFormat Format, typename T>
BAGUA_DEVICE void encode_tile_of(const Tile& tile) {
  using Code = typename Format::Code;
  constexpr int kPerVector = TileValues<T>::kPerVector;
  const T* x = static_cast<const T*>(tile.chunk.x) + tile.first;
  const int whole = tile.whole_vectors<kPerVector, kPerVector * sizeof(Code)>();
  TileValues<T> values;
  values.load(x, whole);
  Code* codes = reinterpret_cast<Code*>(tile.chunk.payload) + tile.first;
  encode_tile(values, x, whole, tile.numel, codes,
              [](float value) { return Format::quantise(value); });
  if (tile.is_last()) {
    std::byte* end = tile.chunk.payload + tile.chunk.numel * sizeof(Code);
    clear_bytes(
        end, tile.chunk.payload + format_payload_bytes<Format>(DType::kFloat32, tile.chunk.numel));
  }
}

template <typename Format, typename T>
__global__ void __launch_bounds__(kTileThreads, kTileCtas)
    encode_tiles(const __grid_constant__ ChunkBatch batch) {
  const int64_t unit = int64_t{blockIdx.x} * kTileWarps + warp_index();
  if (unit >= batch.units()) return;
  const int index = batch.chunk_of(unit);
  encode_tile_of<Format, T>(Tile(batch.chunks[index], unit - batch.first_unit[index]));
}

// The header of a chunk and the zeros around its codes, by the first warp of a CTA.
template <ChunkRangedFormat Format, typename T>
BAGUA_DEVICE void write_around_codes(const Chunk& chunk, const RangedLayout& layout,
                                     HeaderOf<Format, T> header) {
  if (warp_index() != 0) return;
  if (lane_index() == 0 && chunk.numel > 0) write_header(header, chunk.payload);
  const int64_t header_bytes = chunk.numel > 0 ? sizeof(header) : 0;
  clear_bytes(chunk.payload + header_bytes, chunk.payload + layout.codes_offset);
  clear_bytes(chunk.payload + layout.codes_offset + layout.codes_bytes,
              chunk.payload + layout.payload_bytes);
}

// Units are slices; a CTA has one. `of_slice`: output of scan_slices for the same batch.
template <RangedFormat Format, typename T>
__global__ void __launch_bounds__(kSliceThreads)
    encode_slices(const __grid_constant__ ChunkBatch batch,
                  const ExtentOf<Format>* __restrict of_slice) {
  constexpr int kPerVector = TileValues<T>::kPerVector;
  // The slices that were scanned last come first: they are still in the second-level cache.
  const int64_t unit = int64_t{gridDim.x} - 1 - blockIdx.x;
  const int index = batch.chunk_of(unit);
  const Chunk chunk = batch.chunks[index];
  const T* const x = static_cast<const T*>(chunk.x);
  const RangedLayout layout = layout_of<Format, T>(chunk.numel);
  const int64_t slice = unit - batch.first_unit[index];
  const int64_t begin = slice * slice_tiles(chunk.numel);
  const int64_t end = begin + slice_tiles(chunk.numel);

  // 1. The first tile is under way while the ranges of all slices are reduced.
  TileValues<T> values;
  Tile tile(chunk, begin + warp_index());
  int whole = tile.whole_vectors<kPerVector, kPerVector>();
  if (tile.numel > 0) values.load(x + tile.first, whole);
  const auto header = joined_header<Format, T>(batch, index, of_slice);

  // 2.
  if (slice == 0) write_around_codes<Format, T>(chunk, layout, header);

  // 3. The codes, tile by tile.
  const typename Format::Grid grid = Format::grid(header);
  uint8_t* const codes = reinterpret_cast<uint8_t*>(chunk.payload + layout.codes_offset);
  while (tile.numel > 0) {
    quantise_tile<Format>(values, x + tile.first, whole, tile.numel, codes + tile.first, grid);
    if (tile.index + kSliceWarps >= end) break;
    tile = Tile(chunk, tile.index + kSliceWarps);
    whole = tile.whole_vectors<kPerVector, kPerVector>();
    if (tile.numel > 0) values.load(x + tile.first, whole);
  }
}

}  // namespace bagua
