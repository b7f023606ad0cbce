// The extent of a tile, of a slice and of a chunk on the device: in a fixed order, without atomics,
// and without memory that must be initialised.
//
// A codec with one range per chunk finds it in a separate launch:
// scan_slices leaves the extent of each slice in scratch, and the encoder of each slice reduces all
// slices of its chunk again (12 KiB from the second-level cache for minmax_uint8).
#pragma once

#include "base/device.h"
#include "codec/chunk_batch.h"
#include "codec/chunk_parts.h"
#include "codec/cuda/tile.cuh"

namespace bagua {

// A format with one range for a whole chunk.
template <typename Format>
concept ChunkRangedFormat = RangedFormat<Format> && (Format::kBlockNumel == 0);

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

// The Extent of Format of one lane or thread.
template <ExtentFormat Format>
using ExtentOf = typename Format::template Extent<1>;

template <ExtentFormat Format>
BAGUA_DEVICE ExtentOf<Format> empty_extent() {
  ExtentOf<Format> extent;
  extent.start(0);
  return extent;
}

// The extent of the lane at this distance; all lanes of the warp call it.
template <typename Extent>
BAGUA_DEVICE Extent exchanged(const Extent& extent, int distance) {
  constexpr int kWords = sizeof(Extent) / sizeof(uint32_t);
  static_assert(sizeof(Extent) % sizeof(uint32_t) == 0);
  uint32_t words[kWords];
  __builtin_memcpy(words, &extent, sizeof(Extent));
  BAGUA_UNROLL
  for (int i = 0; i < kWords; ++i) words[i] = __shfl_xor_sync(kAllLanes, words[i], distance);
  Extent other;
  __builtin_memcpy(&other, words, sizeof(Extent));
  return other;
}

// The first of a thread's lanes, all joined to it.
template <int kCount, template <int> typename Statistics>
BAGUA_DEVICE Statistics<1> folded(Statistics<kCount> lanes) {
  fold_lanes<kCount>(lanes);
  Statistics<1> all;
  all.start(0);
  all.join(0, lanes, 0);
  return all;
}

// Joins the extents of kLanes neighbouring lanes, in each of them. All lanes of the warp call it.
template <int kLanes = kWarpLanes, int kCount, template <int> typename Extent>
BAGUA_DEVICE Extent<kCount> join_lanes(Extent<kCount> extent) {
  BAGUA_UNROLL
  for (int distance = kLanes / 2; distance > 0; distance /= 2) {
    const Extent<kCount> other = exchanged(extent, distance);
    BAGUA_UNROLL
    for (int lane = 0; lane < kCount; ++lane) extent.join(lane, other, lane);
  }
  return extent;
}

// Statistics of a block's values (Note [Formats]), in each of the kLanes lanes that have them:
// of(v, k) of lane l is element (v * kLanes + l) * kNumel + k. All lanes of the warp call it.
template <RangedFormat Format, template <int> typename Statistics, int kVectors, int kNumel,
          int kLanes, typename Values, typename... Arguments>
BAGUA_DEVICE Statistics<1> collect_neighbours(const Values& of, Arguments... arguments) {
  constexpr int kOwn = ExtentFormat<Format> ? 1 : kNumel;
  Statistics<kOwn> gathered;
  BAGUA_UNROLL
  for (int lane = 0; lane < kOwn; ++lane) gathered.start(lane);
  BAGUA_UNROLL
  for (int v = 0; v < kVectors; ++v) {
    BAGUA_UNROLL
    for (int k = 0; k < kNumel; ++k) gathered.take(k % kOwn, of(v, k), arguments...);
  }
  return folded<kOwn>(join_lanes<kLanes>(gathered));
}

// Values x[0, numel) that the lanes of the warp take one by one, as values of a range.
template <typename Format, typename Values>
struct ElementValues {
  const Values& x;
  int count;

  BAGUA_DEVICE int64_t numel() const { return count; }

  template <template <int> typename Statistics, typename... Arguments>
  BAGUA_DEVICE Statistics<1> collect(Arguments... arguments) const {
    constexpr int kOwn = own();
    Statistics<kOwn> gathered;
    BAGUA_UNROLL
    for (int lane = 0; lane < kOwn; ++lane) gathered.start(lane);
    for (int i = lane_index(); i < count; i += kWarpLanes) {
      gathered.take(i / kWarpLanes % kOwn, widen(x[i]), arguments...);
    }
    return join_lanes(folded<kOwn>(gathered));
  }

 private:
  BAGUA_HD static constexpr int own() {
    if constexpr (ExtentFormat<Format>) {
      return 1;
    } else {
      static_assert(kSumLanes<Format> % kWarpLanes == 0);
      return kSumLanes<Format> / kWarpLanes;
    }
  }
};

// Joins the extents of all threads of the CTA, in every thread. Once per kernel: the shared memory
// is not guarded for a second use.
template <ExtentFormat Format>
BAGUA_DEVICE ExtentOf<Format> join_threads(ExtentOf<Format> extent) {
  __shared__ ExtentOf<Format> of_warp[kSliceWarps];
  const ExtentOf<Format> mine = join_lanes(extent);
  if (lane_index() == 0) of_warp[warp_index()] = mine;
  __syncthreads();
  ExtentOf<Format> all = empty_extent<Format>();
  BAGUA_UNROLL
  for (int warp = 0; warp < kSliceWarps; ++warp) all.join(0, of_warp[warp], 0);
  return all;
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

  // Extends the extent by the whole tile of `numel` elements.
  template <typename Extent>
  BAGUA_DEVICE void extend(Extent& extent, const T* x, int whole, int numel) const {
    BAGUA_UNROLL
    for (int j = 0; j < Mine::kCount; ++j) {
      BAGUA_UNROLL
      for (int k = 0; k < kPerVector; ++k) extent.take(0, value(j, k));
    }
    for (int i = whole + lane_index(); i < numel; i += kWarpLanes) extent.take(0, widen(x[i]));
  }
};

// The header of a batch's chunk, in every thread of the CTA: as join_threads, once per kernel.
// `of_slice`: the extents of all slices of the batch.
template <ChunkRangedFormat Format, typename T>
BAGUA_DEVICE HeaderOf<Format, T> joined_header(const ChunkBatch& batch, int index,
                                               const ExtentOf<Format>* of_slice) {
  ExtentOf<Format> extent = empty_extent<Format>();
  for (int64_t i = threadIdx.x; i < slices_of(batch.chunks[index].numel); i += kSliceThreads) {
    extent.join(0, of_slice[batch.first_unit[index] + i], 0);
  }
  return Format::template header<T>(join_threads<Format>(extent));
}

// Writes the extent of each slice of the batch's chunks, whose units are slices, to of_slice.
template <ExtentFormat Format, typename T>
__global__ void __launch_bounds__(kSliceThreads)
    scan_slices(const __grid_constant__ ChunkBatch batch, ExtentOf<Format>* __restrict of_slice) {
  const int64_t unit = blockIdx.x;
  const int index = batch.chunk_of(unit);
  const Chunk chunk = batch.chunks[index];
  const int64_t begin = (unit - batch.first_unit[index]) * slice_tiles(chunk.numel);
  ExtentOf<Format> extent = empty_extent<Format>();
  for (int64_t t = begin + warp_index(); t < begin + slice_tiles(chunk.numel); t += kSliceWarps) {
    const Tile tile(chunk, t);
    if (tile.numel <= 0) break;
    const T* x = static_cast<const T*>(chunk.x) + tile.first;
    const int whole = tile.whole_vectors<TileValues<T>::kPerVector, 1>();
    TileValues<T> values;
    values.load(x, whole);
    values.extend(extent, x, whole, tile.numel);
  }
  const ExtentOf<Format> found = join_threads<Format>(extent);
  if (threadIdx.x == 0) of_slice[unit] = found;
}

}  // namespace bagua
