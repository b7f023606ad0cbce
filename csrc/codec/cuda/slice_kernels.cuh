// Fused kernels of codecs whose range is a whole chunk: a pass over the slices for each range that
// has to be known before the next step.
//
// encode_sum: scan_slices finds the range of x; sum_slices makes x the mean and finds the mean's
// range; encode_mean_slices encodes it and makes x what it decodes to.
// encode_sum_residual: likewise without the scan; x takes the mean plus `before` in between.
// encode_combined: combine_slices writes the differences and finds their range; encode_slices.
#pragma once

#include "base/device.h"
#include "codec/chunk_batch.h"
#include "codec/cuda/fused_ranges.cuh"
#include "codec/cuda/range_kernels.cuh"
#include "codec/cuda/sum_goals.cuh"
#include "codec/cuda/three_array_kernels.cuh"
#include "codec/fused_codec.h"

namespace bagua {

// CTAs per multiprocessor. Left alone the compiler aims at more, and spills.
constexpr int kFusedSliceCtas = 2;

// A slice of a chunk.
struct Slice {
  int index;  // of the chunk in its batch
  Chunk chunk;
  int64_t number;  // of the slice in its chunk

  BAGUA_DEVICE Slice(const ChunkBatch& batch, int64_t unit)
      : index(batch.chunk_of(unit)),
        chunk(batch.chunks[index]),
        number(unit - batch.first_unit[index]) {}

  // Calls function(tile) for the calling warp's tiles.
  template <typename Function>
  BAGUA_DEVICE void for_each_tile(Function function) const {
    const int64_t begin = number * slice_tiles(chunk.numel);
    const int64_t end = begin + slice_tiles(chunk.numel);
    for (int64_t t = begin + warp_index(); t < end; t += kSliceWarps) {
      const Tile tile(chunk, t);
      if (tile.numel <= 0) break;
      function(tile);
    }
  }
};

// Writes the extent that the warps have gathered of a slice. Barrier: for join_threads.
template <ChunkRangedFormat Format>
BAGUA_DEVICE void store_extent(const ExtentOf<Format>& extent, ExtentOf<Format>* of_slice) {
  __syncthreads();
  const ExtentOf<Format> found = join_threads<Format>(extent);
  if (threadIdx.x == 0) *of_slice = found;
}

template <ChunkRangedFormat Format, typename T>
BAGUA_DEVICE RangeCoder<Format, T> coder_with(HeaderOf<Format, T> header) {
  return {{header, Format::grid(header)}};
}

// ---- encode_sum, encode_sum_residual ----

// x <- what is to be encoded of the sum of all versions; extends its extent. `own`: what encodes x
// for the own version; null where that is encoded.
template <ChunkRangedFormat Format, typename Goal, typename T = typename Goal::Element>
BAGUA_DEVICE void sum_in_registers(const Tile& tile, const PayloadVersions& versions,
                                   const Goal& goal, const RangeCoder<Format, T>* own,
                                   ExtentOf<Format>& extent) {
  using Map = TileMap<Format, T, kOwnVector<T>>;
  const TileSections<Format, T> sections(tile);
  BAGUA_UNROLL
  for (int r = 0; r < Map::kRanges; ++r) {
    RangeValues<Map> sums{};
    for (int row = 0; row < versions.rows; ++row) {
      const std::byte* const payload = payload_of(tile.chunk, versions, row);
      const bool encodes = own != nullptr && row == versions.own;
      const CodeBook<Format, T> book(encodes ? own->header : sections.header(payload, 0));
      const PackedRange<Map> packed = encodes ? RangeValues<Map>::load(goal.x, r).quantised(*own)
                                              : PackedRange<Map>::load(payload + sections.codes, r);
      packed.decode(book, [&](int v, int k, T value) {
        sums.of[v][k] = add_weighted(sums.of[v][k], 1.0f, value);
      });
    }
    complete(sums, goal, r);
    BAGUA_UNROLL
    for (int v = 0; v < Map::kVectors; ++v) {
      Words<4> vector{};
      BAGUA_UNROLL
      for (int k = 0; k < Map::kNumel; ++k) {
        extent.take(0, sums.of[v][k]);
        put_element(vector, k, narrow<T>(sums.of[v][k]));
      }
      store_words(goal.x + Map::element(r, v), vector);
    }
  }
}

// Likewise, element by element.
template <ChunkRangedFormat Format, typename Goal, typename T = typename Goal::Element>
BAGUA_DEVICE void sum_by_elements(const Tile& tile, const PayloadVersions& versions,
                                  const Goal& goal, const RangeCoder<Format, T>* own,
                                  ExtentOf<Format>& extent) {
  const auto fill = [&](const OwnVersion<Format, T>* version) {
    for (int i = lane_index(); i < tile.numel; i += kWarpLanes) {
      const float sum = sum_of_element<Format, T>(tile, versions, {0, tile.numel, 0}, version, i);
      const float completed = goal.completed(sum, i);
      extent.take(0, completed);
      goal.x[i] = narrow<T>(completed);
    }
  };
  if (own == nullptr) return fill(nullptr);
  const OwnVersion<Format, T> version(goal.x, *own);
  fill(&version);
}

// Units are slices; a CTA has one. `of_own`: output of scan_slices for the same batch; not read
// where the own version is encoded.
template <ChunkRangedFormat Format, typename Arguments>
__global__ void __launch_bounds__(kSliceThreads, kFusedSliceCtas)
    sum_slices(const __grid_constant__ ChunkBatch batch,
               const __grid_constant__ PayloadVersions versions,
               const __grid_constant__ Arguments arguments,
               const ExtentOf<Format>* __restrict of_own, ExtentOf<Format>* __restrict of_mean) {
  using Goal = typename Arguments::Goal;
  using T = typename Goal::Element;
  // The slices that were scanned last come first: they are still in the second-level cache.
  const int64_t unit = int64_t{gridDim.x} - 1 - blockIdx.x;
  const Slice slice(batch, unit);
  const bool aligned = are_aligned(slice.chunk, versions);
  ExtentOf<Format> extent = empty_extent<Format>();
  const auto sum_tiles = [&](const RangeCoder<Format, T>* own) {
    slice.for_each_tile([&](const Tile& tile) {
      const Goal goal = arguments.goal(tile);
      if (aligned && goal.is_aligned() && tile.numel == kTileNumel) {
        sum_in_registers<Format>(tile, versions, goal, own, extent);
      } else {
        sum_by_elements<Format>(tile, versions, goal, own, extent);
      }
    });
  };
  if constexpr (Goal::kOwnIsEncoded) {
    sum_tiles(nullptr);
  } else {
    const auto own = coder_with<Format, T>(joined_header<Format, T>(batch, slice.index, of_own));
    sum_tiles(&own);
  }
  store_extent<Format>(extent, of_mean + unit);
}

// Units are slices; a CTA has one. `of_mean`: output of sum_slices for the same batch.
template <ChunkRangedFormat Format, typename Arguments>
__global__ void __launch_bounds__(kSliceThreads, kFusedSliceCtas)
    encode_mean_slices(const __grid_constant__ ChunkBatch batch,
                       const __grid_constant__ Arguments arguments,
                       const ExtentOf<Format>* __restrict of_mean) {
  using Goal = typename Arguments::Goal;
  using T = typename Goal::Element;
  using Map = TileMap<Format, T, kOwnVector<T>>;
  const Slice slice(batch, blockIdx.x);
  const Chunk& chunk = slice.chunk;
  const auto header = joined_header<Format, T>(batch, slice.index, of_mean);
  if (slice.number == 0) {
    write_around_codes<Format, T>(chunk, layout_of<Format, T>(chunk.numel), header);
  }
  const auto coder = coder_with<Format, T>(header);
  const CodeBook<Format, T> book(header);
  slice.for_each_tile([&](const Tile& tile) {
    std::byte* const codes = chunk.payload + TileSections<Format, T>(tile).codes;
    const Goal goal = arguments.goal(tile);
    if (!goal.is_aligned() || !is_aligned(chunk.payload) || tile.numel < kTileNumel) {
      for (int i = lane_index(); i < tile.numel; i += kWarpLanes) {
        const float value = widen(goal.x[i]);
        const uint8_t code = coder.code(value);
        codes[i] = std::byte{code};
        goal.put(value, book.all(code), i);
      }
      return;
    }
    BAGUA_UNROLL
    for (int r = 0; r < Map::kRanges; ++r) {
      store_encoded<Format>(RangeValues<Map>::load(goal.x, r), coder, codes, goal, r);
    }
  });
}

// ---- encode_combined ----

// Units are slices; a CTA has one. Writes the differences of the elements from `first` on to
// `differences`, and the extent of each slice's to of_slice.
template <ChunkRangedFormat Format, typename T>
__global__ void __launch_bounds__(kSliceThreads, kFusedSliceCtas)
    combine_slices(const __grid_constant__ ChunkBatch batch,
                   const __grid_constant__ ThreeArrays arrays, ThreeWeights weights, const T* first,
                   float* __restrict differences, ExtentOf<Format>* __restrict of_slice) {
  using Mine = LaneVectors<kFloatVector>;
  const int64_t unit = blockIdx.x;
  const Slice slice(batch, unit);
  float* const of_chunk = differences + (static_cast<const T*>(slice.chunk.x) - first);
  const bool aligned = are_aligned<T>(slice.chunk, arrays) && is_aligned(of_chunk);
  ExtentOf<Format> extent = empty_extent<Format>();
  slice.for_each_tile([&](const Tile& tile) {
    const CombinedValues<T> values =
        combined_from<T>(arrays, weights, chunk_offset<T>(slice.chunk, arrays) + tile.first);
    float* const difference = of_chunk + tile.first;
    if (!aligned || tile.numel < kTileNumel) {
      for (int i = lane_index(); i < tile.numel; i += kWarpLanes) {
        difference[i] = values[i];
        extent.take(0, difference[i]);
      }
      return;
    }
    BAGUA_UNROLL
    for (int j = 0; j < Mine::kCount; ++j) {
      const int element = Mine::begin() + j * Mine::kStep;
      Words<4> vector;
      values.for_vector(element, [&](int k, float value) {
        extent.take(0, value);
        put_element(vector, k, value);
      });
      store_words(difference + element, vector);
    }
  });
  const ExtentOf<Format> found = join_threads<Format>(extent);
  if (threadIdx.x == 0) of_slice[unit] = found;
}

}  // namespace bagua
