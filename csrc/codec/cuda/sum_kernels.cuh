// encode_sum and encode_sum_residual of FusedCodec for formats whose ranges are at most a tile: one
// pass.
#pragma once

#include "base/device.h"
#include "codec/chunk_batch.h"
#include "codec/cuda/sum_goals.cuh"
#include "codec/fused_codec.h"

namespace bagua {

template <TiledFormat Format, typename Goal>
BAGUA_DEVICE void encode_sum_by_elements(const Tile& tile, const PayloadVersions& versions,
                                         const Goal& goal) {
  using T = typename Goal::Element;
  const TileSections<Format, T> sections(tile);
  const auto sum_range = [&](int first, int numel, int range) {
    T* const x = goal.x + first;
    const auto fill = [&](const OwnVersion<Format, T>* own) {
      for (int i = lane_index(); i < numel; i += kWarpLanes) {
        const float sum = sum_of_element<Format, T>(tile, versions, {first, numel, range}, own, i);
        x[i] = narrow<T>(goal.completed(sum, first + i));
      }
    };
    if constexpr (Goal::kOwnIsEncoded) {
      fill(nullptr);
    } else {
      const ElementValues<Format, const T*> values{x, numel};
      const OwnVersion<Format, T> own(x, coder_of<Format, T>(values));
      fill(&own);
    }
    __syncwarp();  // lanes read what others have written, and write what others have read
    encode_range_of<Format, T>(x, numel, sections, tile.chunk.payload, first, range);
    __syncwarp();
    const RangeReader<Format, T> result(sections, tile.chunk.payload, first, numel, range);
    for (int i = lane_index(); i < numel; i += kWarpLanes) {
      goal.put(widen(x[i]), result[i], first + i);
    }
  };
  for_each_range_of<Format>(tile, sum_range);
}

template <TiledFormat Format, typename Goal>
BAGUA_DEVICE void encode_sum_in_registers(const Tile& tile, const PayloadVersions& versions,
                                          const Goal& goal) {
  using T = typename Goal::Element;
  using Map = TileMap<Format, T, kOwnVector<T>>;
  using Book = CodeBook<Format, T>;
  const TileSections<Format, T> sections(tile);
  RangeValues<Map> sums[Map::kRanges]{};

  // 1. The versions, in the order of rows.
  for (int row = 0; row < versions.rows; ++row) {
    const std::byte* const payload = payload_of(tile.chunk, versions, row);
    PackedRange<Map> packed[Map::kRanges];
    typename Book::Header headers[Map::kRanges];
    BAGUA_UNROLL
    for (int r = 0; r < Map::kRanges; ++r) {
      if (!Goal::kOwnIsEncoded && row == versions.own) {
        const auto coder = RangeValues<Map>::load(goal.x, r).template coder<Format, T>();
        __syncwarp();  // or the values would be held, not loaded again, and fill the registers
        packed[r] = RangeValues<Map>::load(goal.x, r).quantised(coder);
        headers[r] = coder.header;
      } else {
        packed[r] = PackedRange<Map>::load(payload + sections.codes, r);
        headers[r] = sections.header(payload, Map::range(r));
      }
    }
    BAGUA_UNROLL
    for (int r = 0; r < Map::kRanges; ++r) {
      packed[r].decode(Book(headers[r]), [&](int v, int k, T value) {
        sums[r].of[v][k] = add_weighted(sums[r].of[v][k], 1.0f, value);
      });
    }
  }

  if (Goal::kOwnIsEncoded) __syncwarp();  // a lane writes headers that others have read

  // 2. What is to be encoded, its payload, and what that decodes to.
  BAGUA_UNROLL
  for (int r = 0; r < Map::kRanges; ++r) {
    complete<Map>(sums[r], goal, r);
    const auto coder = sums[r].template coder<Format, T>();
    store_header<Map>(coder.header, tile.chunk.payload + sections.headers, r);
    store_encoded<Format>(sums[r], coder, tile.chunk.payload + sections.codes, goal, r);
  }
}

// Units are tiles; a warp has one.
template <TiledFormat Format, typename Arguments>
__global__ void __launch_bounds__(kTileThreads, kTileCtasOfSums)
    encode_sum_tiles(const __grid_constant__ ChunkBatch batch,
                     const __grid_constant__ PayloadVersions versions,
                     const __grid_constant__ Arguments arguments) {
  const int64_t unit = int64_t{blockIdx.x} * kTileWarps + warp_index();
  if (unit >= batch.units()) return;
  const int index = batch.chunk_of(unit);
  const Tile tile(batch.chunks[index], unit - batch.first_unit[index]);
  const typename Arguments::Goal goal = arguments.goal(tile);
  if (tile.numel == kTileNumel && are_aligned(tile.chunk, versions) && goal.is_aligned()) {
    encode_sum_in_registers<Format>(tile, versions, goal);
  } else {
    encode_sum_by_elements<Format>(tile, versions, goal);
  }
  clear_padding_of<Format, typename Arguments::Goal::Element>(tile);
}

}  // namespace bagua
