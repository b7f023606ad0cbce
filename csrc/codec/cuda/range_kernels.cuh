// The range of a tile, of a slice and of a chunk on the device: in a fixed order, without atomics,
// and without memory that someone would have to initialise.
//
// minmax_uint8 has one range per chunk, however large, so that finding it takes a launch of its
// own: scan_slices leaves the range of each slice in scratch, and the encoder of each slice reduces
// all slices of its chunk again (8 KiB from the second-level cache).
#pragma once

#include "base/device.h"
#include "codec/chunk_batch.h"
#include "codec/chunk_parts.h"
#include "codec/cuda/tile.cuh"

namespace bagua {

// A slice: the consecutive tiles of a chunk that one CTA works on.
constexpr int kSliceWarps = 8;
constexpr int kSliceThreads = kSliceWarps * kWarpLanes;
constexpr int64_t kMaxSlices = 1024;

BAGUA_HD constexpr int64_t slice_tiles(int64_t numel) {
  const int64_t rounds =
      (tiles_of(numel) + kSliceWarps * kMaxSlices - 1) / (kSliceWarps * kMaxSlices);
  return kSliceWarps * (rounds > 1 ? rounds : 1);
}

// At least one: an empty chunk has a header too.
BAGUA_HD constexpr int64_t slices_of(int64_t numel) {
  const int64_t slices = (tiles_of(numel) + slice_tiles(numel) - 1) / slice_tiles(numel);
  return slices > 1 ? slices : 1;
}

struct RangeSoFar {
  float low = kStartLow;
  float high = kStartHigh;
  uint32_t marks = 0;

  BAGUA_DEVICE void take(float value) { extend_range(value, low, high, marks); }
  // The range of nothing, which is turned inside out, changes nothing.
  BAGUA_DEVICE void take(ValueRange range) {
    low = lesser(range.min, low);
    high = greater(range.max, high);
    marks |= non_finite_mark(range.min);
  }
};

// The range of what all lanes of the warp have met, in every lane.
BAGUA_DEVICE ValueRange warp_range(RangeSoFar range) {
  BAGUA_UNROLL
  for (int distance = kWarpLanes / 2; distance > 0; distance /= 2) {
    range.low = lesser(__shfl_xor_sync(kAllLanes, range.low, distance), range.low);
    range.high = greater(__shfl_xor_sync(kAllLanes, range.high, distance), range.high);
  }
  return finished_range(range.low, range.high, __all_sync(kAllLanes, !is_marked(range.marks)));
}

// The range of what all threads of the CTA have met, in every thread. Once per kernel: the shared
// memory is not guarded for a second use.
BAGUA_DEVICE ValueRange slice_range(RangeSoFar range) {
  __shared__ ValueRange of_warp[kSliceWarps];
  const ValueRange mine = warp_range(range);
  if (lane_index() == 0) of_warp[warp_index()] = mine;
  __syncthreads();
  RangeSoFar all;
  BAGUA_UNROLL
  for (int warp = 0; warp < kSliceWarps; ++warp) all.take(of_warp[warp]);
  return finished_range(all.low, all.high, !is_marked(all.marks));
}

// The vectors of a tile, in registers.
template <typename T>
struct TileValues {
  static constexpr int kPerVector = kVectorBytes / sizeof(T);
  using Mine = LaneVectors<kPerVector>;

  Words<4> vectors[Mine::kCount];

  // x: the tile's first element. Vectors from element `whole` on are filled with copies of *x,
  // which change no range.
  BAGUA_DEVICE void load(const T* x, int whole) {
    const T* const mine = x + Mine::begin();
    if (whole == kTileNumel) {
      BAGUA_UNROLL
      for (int j = 0; j < Mine::kCount; ++j) vectors[j] = load_words<4>(mine + j * Mine::kStep);
      return;
    }
    Words<4> copies{};
    BAGUA_UNROLL
    for (int k = 0; k < kPerVector; ++k) put_element(copies, k, *x);
    const int left = whole - Mine::begin();
    BAGUA_UNROLL
    for (int j = 0; j < Mine::kCount; ++j) {
      vectors[j] = j * Mine::kStep < left ? load_words<4>(mine + j * Mine::kStep) : copies;
    }
  }

  BAGUA_DEVICE float value(int j, int k) const { return widen(element_of<T>(vectors[j], k)); }

  // Extends the range by the whole tile of `numel` elements.
  BAGUA_DEVICE void extend(RangeSoFar& range, const T* x, int whole, int numel) const {
    BAGUA_UNROLL
    for (int j = 0; j < Mine::kCount; ++j) {
      BAGUA_UNROLL
      for (int k = 0; k < kPerVector; ++k) range.take(value(j, k));
    }
    for (int i = whole + lane_index(); i < numel; i += kWarpLanes) range.take(widen(x[i]));
  }
};

// Writes the range of each slice of the batch's chunks, whose units are slices, to of_slice.
template <typename T>
__global__ void __launch_bounds__(kSliceThreads)
    scan_slices(const __grid_constant__ ChunkBatch batch, ValueRange* __restrict of_slice) {
  const int64_t unit = blockIdx.x;
  const int index = batch.chunk_of(unit);
  const Chunk chunk = batch.chunks[index];
  const int64_t begin = (unit - batch.first_unit[index]) * slice_tiles(chunk.numel);
  RangeSoFar range;
  for (int64_t t = begin + warp_index(); t < begin + slice_tiles(chunk.numel); t += kSliceWarps) {
    const Tile tile(chunk, t);
    if (tile.numel <= 0) break;
    const T* x = static_cast<const T*>(chunk.x) + tile.first;
    const int whole = tile.whole_vectors<TileValues<T>::kPerVector, 1>();
    TileValues<T> values;
    values.load(x, whole);
    values.extend(range, x, whole, tile.numel);
  }
  const ValueRange found = slice_range(range);
  if (threadIdx.x == 0) of_slice[unit] = found;
}

}  // namespace bagua
