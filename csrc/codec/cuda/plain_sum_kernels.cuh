// Sums of a rank's own elements and the other ranks' payloads, which are not encoded again: one
// pass.
#pragma once

#include "base/device.h"
#include "base/launch.h"
#include "codec/chunk_batch.h"
#include "codec/cuda/sum_goals.cuh"
#include "codec/fused_codec.h"

namespace bagua {

// Payloads that are the elements themselves.
template <typename T>
struct PlainElements {
  using Code = T;
  static constexpr int64_t kBlockNumel = 1;
  template <typename Decoded>
  BAGUA_HD static Decoded dequantise(Code code) {
    return code;
  }
};

template <typename T>
BAGUA_DEVICE T scaled_sum(float sum, const SumScale& scale) {
  return narrow<T>(sum / scale.divisor * scale.factor);
}

template <HeldFormat Format, typename T>
BAGUA_DEVICE void sum_tile_by_elements(const Tile& tile, const PayloadVersions& versions,
                                       const SumScale& scale, T* x) {
  for_each_range_of<Format>(tile, [&](int first, int numel, int range) {
    const T* const own = x + first;
    for (int i = lane_index(); i < numel; i += kWarpLanes) {
      const float sum = sum_of_element<Format, T>(tile, versions, {first, numel, range}, &own, i);
      x[first + i] = scaled_sum<T>(sum, scale);
    }
  });
}

template <HeldFormat Format, typename T>
BAGUA_DEVICE void sum_tile_in_registers(const Tile& tile, const PayloadVersions& versions,
                                        const SumScale& scale, T* x) {
  using Map = TileMap<Format, T, kOwnVector<T>>;
  const TileSections<Format, T> sections(tile);
  BAGUA_UNROLL
  for (int r = 0; r < Map::kRanges; ++r) {
    RangeValues<Map> sums{};
    const auto add = [&](int v, int k, auto value) {
      sums.of[v][k] = add_weighted(sums.of[v][k], 1.0f, value);
    };
    for (int row = 0; row < versions.rows; ++row) {
      if (row == versions.own) {
        RangeValues<Map>::load(x, r).for_each(add);
      } else {
        const std::byte* const payload = payload_of(tile.chunk, versions, row);
        const CodeBook<Format, T> book(sections.header(payload, Map::range(r)));
        PackedRange<Map>::load(payload + sections.codes, r).decode(book, add);
      }
    }
    BAGUA_UNROLL
    for (int v = 0; v < Map::kVectors; ++v) {
      Words<4> vector{};
      BAGUA_UNROLL
      for (int k = 0; k < Map::kNumel; ++k) {
        put_element(vector, k, scaled_sum<T>(sums.of[v][k], scale));
      }
      store_words(x + Map::element(r, v), vector);
    }
  }
}

// Units are tiles; a warp has one.
template <HeldFormat Format, typename T>
__global__ void __launch_bounds__(kTileThreads, kTileCtasOfSums)
    sum_tiles(const __grid_constant__ ChunkBatch batch,
              const __grid_constant__ PayloadVersions versions, SumScale scale) {
  const int64_t unit = int64_t{blockIdx.x} * kTileWarps + warp_index();
  if (unit >= batch.units()) return;
  const int index = batch.chunk_of(unit);
  const Tile tile(batch.chunks[index], unit - batch.first_unit[index]);
  T* const x = static_cast<T*>(tile.chunk.x) + tile.first;
  if (tile.numel == kTileNumel && are_aligned(tile.chunk, versions)) {
    sum_tile_in_registers<Format, T>(tile, versions, scale, x);
  } else {
    sum_tile_by_elements<Format, T>(tile, versions, scale, x);
  }
}

template <HeldFormat Format, typename T>
void launch_sum_tiles(std::span<const Chunk> chunks, const PayloadVersions& versions,
                      const SumScale& scale, StreamHandle stream) {
  for_each_tile_batch(chunks, [&](const ChunkBatch& batch, int64_t grid) {
    launch("sum_tiles", sum_tiles<Format, T>, grid, kTileThreads, stream, batch, versions, scale);
  });
}

}  // namespace bagua
