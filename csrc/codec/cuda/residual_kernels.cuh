// encode_residual of Codec for formats whose ranges are at most a tile: x is read and written once.
#pragma once

#include "base/device.h"
#include "codec/chunk_batch.h"
#include "codec/cuda/fused_ranges.cuh"

namespace bagua {

template <TiledFormat Format>
BAGUA_DEVICE void encode_residual_in_registers(const Tile& tile) {
  using Map = TileMap<Format, float, kFloatVector>;
  const TileSections<Format, float> sections(tile);
  float* const x = static_cast<float*>(tile.chunk.x) + tile.first;
  BAGUA_UNROLL
  for (int r = 0; r < Map::kRanges; ++r) {
    auto values = RangeValues<Map>::load(x, r);
    const auto coder = values.template coder<Format, float>();
    const PackedRange<Map> packed = values.quantised(coder);
    store_header<Map>(coder.header, tile.chunk.payload + sections.headers, r);
    packed.store(tile.chunk.payload + sections.codes, r);
    packed.decode(CodeBook<Format, float>(coder.header), [&](int v, int k, float value) {
      values.of[v][k] = lost_of(values.of[v][k], value);
    });
    BAGUA_UNROLL
    for (int v = 0; v < Map::kVectors; ++v) {
      Words<4> vector;
      BAGUA_UNROLL
      for (int k = 0; k < Map::kNumel; ++k) put_element(vector, k, values.of[v][k]);
      store_words(x + Map::element(r, v), vector);
    }
  }
}

template <TiledFormat Format>
BAGUA_DEVICE void encode_residual_by_elements(const Tile& tile) {
  const TileSections<Format, float> sections(tile);
  std::byte* const payload = tile.chunk.payload;
  for_each_range_of<Format>(tile, [&](int first, int numel, int range) {
    float* const x = static_cast<float*>(tile.chunk.x) + tile.first + first;
    encode_range_of<Format, float>(x, numel, sections, payload, first, range);
    __syncwarp();  // lanes read what others have written, and write what others have read
    const RangeReader<Format, float> decoded(sections, payload, first, numel, range);
    for (int i = lane_index(); i < numel; i += kWarpLanes) x[i] = lost_of(x[i], decoded[i]);
  });
}

// Units are tiles; a warp has one.
template <TiledFormat Format>
__global__ void __launch_bounds__(kTileThreads, kTileCtasOfSums)
    encode_residual_tiles(const __grid_constant__ ChunkBatch batch) {
  const int64_t unit = int64_t{blockIdx.x} * kTileWarps + warp_index();
  if (unit >= batch.units()) return;
  const int index = batch.chunk_of(unit);
  const Tile tile(batch.chunks[index], unit - batch.first_unit[index]);
  if (tile.numel == kTileNumel && is_aligned(tile.chunk.x) && is_aligned(tile.chunk.payload)) {
    encode_residual_in_registers<Format>(tile);
  } else {
    encode_residual_by_elements<Format>(tile);
  }
  clear_padding_of<Format, float>(tile);
}

}  // namespace bagua
