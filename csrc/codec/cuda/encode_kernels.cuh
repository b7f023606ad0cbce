// Encoding on the device: x is read once (minmax_uint8: twice, see range_kernels.cuh) and the
// payload written once, in full.
#pragma once

#include "base/device.h"
#include "codec/chunk_batch.h"
#include "codec/chunk_parts.h"
#include "codec/cuda/range_kernels.cuh"
#include "codec/cuda/tile.cuh"

namespace bagua {

constexpr int kTileWarps = 4;
constexpr int kTileThreads = kTileWarps * kWarpLanes;

// The lanes of the warp write zeros.
BAGUA_DEVICE void clear_bytes(std::byte* begin, std::byte* end) {
  for (std::byte* byte = begin + lane_index(); byte < end; byte += kWarpLanes) *byte = std::byte{0};
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
template <typename T>
BAGUA_DEVICE void quantise_tile(const TileValues<T>& values, const T* x, int whole, int numel,
                                uint8_t* codes, ValueRange range) {
  const QuantisationGrid grid = quantisation_grid(range);
  if (grid.constant) {
    encode_tile(values, x, whole, numel, codes, [](float) { return uint8_t{0}; });
  } else {
    encode_tile(values, x, whole, numel, codes, [=](float value) { return quantise(value, grid); });
  }
}

// Zeros behind the headers and behind the codes; by the warp of a chunk's last tile.
template <typename T>
BAGUA_DEVICE void clear_padding(const Chunk& chunk, const RangedLayout& layout) {
  clear_bytes(chunk.payload + layout.ranges * 2 * sizeof(T), chunk.payload + layout.codes_offset);
  clear_bytes(chunk.payload + layout.codes_offset + chunk.numel,
              chunk.payload + layout.payload_bytes);
}

// Units are tiles; a warp has one. A tile is a block with a range of its own.
template <RangedFormat Format, typename T>
BAGUA_DEVICE void encode_tile_of(const Tile& tile) {
  static_assert(Format::kBlockNumel == kTileNumel);
  constexpr int kPerVector = TileValues<T>::kPerVector;
  const T* x = static_cast<const T*>(tile.chunk.x) + tile.first;
  const int whole = tile.whole_vectors<kPerVector, kPerVector>();
  TileValues<T> values;
  values.load(x, whole);
  RangeSoFar range_so_far;
  values.extend(range_so_far, x, whole, tile.numel);
  const ValueRange range = warp_range(range_so_far);

  const RangedLayout layout = ranged_layout(kTileNumel, sizeof(T), tile.chunk.numel);
  std::byte* header = tile.chunk.payload + tile.index * 2 * sizeof(T);
  std::byte* codes = tile.chunk.payload + layout.codes_offset + tile.first;
  if (lane_index() == 0) write_header<T>(range, header);
  quantise_tile(values, x, whole, tile.numel, reinterpret_cast<uint8_t*>(codes), range);
  if (tile.is_last()) clear_padding<T>(tile.chunk, layout);
}

template <CastFormat Format, typename T>
BAGUA_DEVICE void encode_tile_of(const Tile& tile) {
  using Element = typename Format::Element;
  constexpr int kPerVector = TileValues<T>::kPerVector;
  const T* x = static_cast<const T*>(tile.chunk.x) + tile.first;
  const int whole = tile.whole_vectors<kPerVector, kPerVector * sizeof(Element)>();
  TileValues<T> values;
  values.load(x, whole);
  Element* elements = reinterpret_cast<Element*>(tile.chunk.payload) + tile.first;
  encode_tile(values, x, whole, tile.numel, elements,
              [](float value) { return narrow<Element>(value); });
  if (tile.is_last()) {
    std::byte* end = tile.chunk.payload + tile.chunk.numel * sizeof(Element);
    clear_bytes(end,
                tile.chunk.payload + format_payload_bytes<Format>(sizeof(T), tile.chunk.numel));
  }
}

template <typename Format, typename T>
__global__ void __launch_bounds__(kTileThreads)
    encode_tiles(const __grid_constant__ ChunkBatch batch) {
  const int64_t unit = int64_t{blockIdx.x} * kTileWarps + warp_index();
  if (unit >= batch.units()) return;
  const int index = batch.chunk_of(unit);
  encode_tile_of<Format, T>(Tile(batch.chunks[index], unit - batch.first_unit[index]));
}

// Units are slices; a CTA has one. of_slice: what scan_slices wrote for the same batch.
template <typename T>
__global__ void __launch_bounds__(kSliceThreads)
    encode_slices(const __grid_constant__ ChunkBatch batch, const ValueRange* __restrict of_slice) {
  constexpr int kPerVector = TileValues<T>::kPerVector;
  // The slices that were scanned last come first: they are still in the second-level cache.
  const int64_t unit = int64_t{gridDim.x} - 1 - blockIdx.x;
  const int index = batch.chunk_of(unit);
  const Chunk chunk = batch.chunks[index];
  const T* const x = static_cast<const T*>(chunk.x);
  const RangedLayout layout = ranged_layout(0, sizeof(T), chunk.numel);
  const int64_t slice = unit - batch.first_unit[index];
  const int64_t begin = slice * slice_tiles(chunk.numel);
  const int64_t end = begin + slice_tiles(chunk.numel);

  // 1. The first tile is under way while the ranges of all slices are reduced.
  TileValues<T> values;
  Tile tile(chunk, begin + warp_index());
  int whole = tile.whole_vectors<kPerVector, kPerVector>();
  if (tile.numel > 0) values.load(x + tile.first, whole);
  RangeSoFar range_so_far;
  for (int64_t i = threadIdx.x; i < slices_of(chunk.numel); i += kSliceThreads) {
    range_so_far.take(of_slice[batch.first_unit[index] + i]);
  }
  const ValueRange range = slice_range(range_so_far);

  // 2. The chunk's first warp writes the header, and what surrounds the codes.
  if (slice == 0 && warp_index() == 0) {
    if (lane_index() == 0 && chunk.numel > 0) write_header<T>(range, chunk.payload);
    const int64_t header_bytes = chunk.numel > 0 ? 2 * sizeof(T) : 0;
    clear_bytes(chunk.payload + header_bytes, chunk.payload + layout.codes_offset);
    clear_bytes(chunk.payload + layout.codes_offset + chunk.numel,
                chunk.payload + layout.payload_bytes);
  }

  // 3. The codes, tile by tile.
  uint8_t* const codes = reinterpret_cast<uint8_t*>(chunk.payload + layout.codes_offset);
  while (tile.numel > 0) {
    quantise_tile(values, x + tile.first, whole, tile.numel, codes + tile.first, range);
    if (tile.index + kSliceWarps >= end) break;
    tile = Tile(chunk, tile.index + kSliceWarps);
    whole = tile.whole_vectors<kPerVector, kPerVector>();
    if (tile.numel > 0) values.load(x + tile.first, whole);
  }
}

}  // namespace bagua
