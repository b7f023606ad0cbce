// Fused kernels of codecs whose range is a whole chunk: a pass over the slices for each range that
// has to be known before the next step.
//
// encode_sum: scan_slices finds the range of x; sum_slices makes x the mean and finds the mean's
// range; encode_mean_slices encodes it and makes x what it decodes to.
// encode_combined: combine_slices writes the differences and finds their range; encode_slices.
#pragma once

#include "base/device.h"
#include "codec/chunk_batch.h"
#include "codec/cuda/fused_ranges.cuh"
#include "codec/cuda/range_kernels.cuh"
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

// ---- encode_sum ----

// x <- mean of all versions, of which x encoded with `own` is one; extends the mean's extent.
template <ChunkRangedFormat Format, typename T>
BAGUA_DEVICE void sum_in_registers(const Tile& tile, const PayloadVersions& versions, float divisor,
                                   const RangeCoder<Format, T>& own, ExtentOf<Format>& extent) {
  using Map = TileMap<Format, T, kOwnVector<T>>;
  const TileSections<Format, T> sections(tile);
  T* const x = static_cast<T*>(tile.chunk.x) + tile.first;
  BAGUA_UNROLL
  for (int r = 0; r < Map::kRanges; ++r) {
    RangeValues<Map> sums{};
    for (int row = 0; row < versions.rows; ++row) {
      const std::byte* const payload =
          in_row(versions.first + row * versions.stride, tile.chunk, versions.results);
      const bool is_own = row == versions.own;
      const CodeBook<Format, T> book(is_own ? own.header : sections.header(payload, 0));
      const PackedRange<Map> packed = is_own ? RangeValues<Map>::load(x, r).quantised(own)
                                             : PackedRange<Map>::load(payload + sections.codes, r);
      packed.decode(book, [&](int v, int k, T value) {
        sums.of[v][k] = add_weighted(sums.of[v][k], 1.0f, value);
      });
    }
    BAGUA_UNROLL
    for (int v = 0; v < Map::kVectors; ++v) {
      Words<4> vector{};
      BAGUA_UNROLL
      for (int k = 0; k < Map::kNumel; ++k) {
        const T mean = narrow<T>(sums.of[v][k] / divisor);
        extent.take(0, widen(mean));
        put_element(vector, k, mean);
      }
      store_words(x + Map::element(r, v), vector);
    }
  }
}

// Likewise, element by element.
template <ChunkRangedFormat Format, typename T>
BAGUA_DEVICE void sum_by_elements(const Tile& tile, const PayloadVersions& versions, float divisor,
                                  const RangeCoder<Format, T>& own, ExtentOf<Format>& extent) {
  const TileSections<Format, T> sections(tile);
  const CodeBook<Format, T> own_book(own.header);
  T* const x = static_cast<T*>(tile.chunk.x) + tile.first;
  for (int i = lane_index(); i < tile.numel; i += kWarpLanes) {
    float sum = 0;
    for (int row = 0; row < versions.rows; ++row) {
      if (row == versions.own) {
        sum = add_weighted(sum, 1.0f, own_book.all(own.code(widen(x[i]))));
      } else {
        const std::byte* const payload =
            in_row(versions.first + row * versions.stride, tile.chunk, versions.results);
        const RangeReader<Format, T> version(sections, payload, 0, tile.numel, 0);
        sum = add_weighted(sum, 1.0f, version[i]);
      }
    }
    x[i] = narrow<T>(sum / divisor);
    extent.take(0, widen(x[i]));
  }
}

// Units are slices; a CTA has one. `of_own`: output of scan_slices for the same batch.
template <ChunkRangedFormat Format, typename T>
__global__ void __launch_bounds__(kSliceThreads, kFusedSliceCtas)
    sum_slices(const __grid_constant__ ChunkBatch batch,
               const __grid_constant__ PayloadVersions versions, float divisor,
               const ExtentOf<Format>* __restrict of_own, ExtentOf<Format>* __restrict of_mean) {
  // The slices that were scanned last come first: they are still in the second-level cache.
  const int64_t unit = int64_t{gridDim.x} - 1 - blockIdx.x;
  const Slice slice(batch, unit);
  const auto own = coder_with<Format, T>(joined_header<Format, T>(batch, slice.index, of_own));
  const bool aligned = are_aligned(slice.chunk, versions);
  ExtentOf<Format> extent = empty_extent<Format>();
  slice.for_each_tile([&](const Tile& tile) {
    if (aligned && tile.numel == kTileNumel) {
      sum_in_registers<Format, T>(tile, versions, divisor, own, extent);
    } else {
      sum_by_elements<Format, T>(tile, versions, divisor, own, extent);
    }
  });
  store_extent<Format>(extent, of_mean + unit);
}

// Units are slices; a CTA has one. `of_mean`: output of sum_slices for the same batch.
template <ChunkRangedFormat Format, typename T>
__global__ void __launch_bounds__(kSliceThreads, kFusedSliceCtas)
    encode_mean_slices(const __grid_constant__ ChunkBatch batch,
                       const ExtentOf<Format>* __restrict of_mean) {
  using Map = TileMap<Format, T, kOwnVector<T>>;
  const Slice slice(batch, blockIdx.x);
  const Chunk& chunk = slice.chunk;
  const auto header = joined_header<Format, T>(batch, slice.index, of_mean);
  if (slice.number == 0) {
    write_around_codes<Format, T>(chunk, layout_of<Format, T>(chunk.numel), header);
  }
  const auto coder = coder_with<Format, T>(header);
  const CodeBook<Format, T> book(header);
  const bool aligned = is_aligned(chunk.x) && is_aligned(chunk.payload);
  slice.for_each_tile([&](const Tile& tile) {
    std::byte* const codes = chunk.payload + TileSections<Format, T>(tile).codes;
    T* const x = static_cast<T*>(chunk.x) + tile.first;
    if (!aligned || tile.numel < kTileNumel) {
      for (int i = lane_index(); i < tile.numel; i += kWarpLanes) {
        const uint8_t code = coder.code(widen(x[i]));
        codes[i] = std::byte{code};
        x[i] = book.all(code);
      }
      return;
    }
    BAGUA_UNROLL
    for (int r = 0; r < Map::kRanges; ++r) {
      const PackedRange<Map> packed = RangeValues<Map>::load(x, r).quantised(coder);
      packed.store(codes, r);
      Words<4> vectors[Map::kVectors]{};
      packed.decode(book, [&](int v, int k, T value) { put_element(vectors[v], k, value); });
      BAGUA_UNROLL
      for (int v = 0; v < Map::kVectors; ++v) store_words(x + Map::element(r, v), vectors[v]);
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
