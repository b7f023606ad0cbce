// The kernels that choose the largest elements, as math/top_k.h defines them.
//
// Note [Largest elements on a device]
//   1. count_digits, once per digit: counts the keys in the range by their next bits, in a
//   histogram
//      per pass. Each CTA first finds the range itself, from the one before and its histogram.
//   2. count_chosen: how many elements of each tile are larger than the k-th, and how many equal.
//   3. sum_tiles: how many of them lie before each tile.
//   4. move_chosen: the elements go to the places that this gives them.
// Sums of integers alone depend on the order of threads, so the result does not. Reads x
// kPasses<T> + 2 times.
#pragma once

#include <cstdint>

#include "base/device.h"
#include "codec/cuda/tile.cuh"
#include "math/magnitude_key.h"

namespace bagua {

constexpr int kTopKThreads = 256;
constexpr int kTopKWarps = kTopKThreads / kWarpLanes;
constexpr int kTopKRows = 16;  // of a tile: each thread has one element of a row
constexpr int64_t kTopKTileNumel = int64_t{kTopKRows} * kTopKThreads;
constexpr int kDigitBits = 11;
constexpr int kDigits = 1 << kDigitBits;
constexpr int kDigitsPerThread = kDigits / kTopKThreads;

template <typename T>
constexpr int kKeyBits = 8 * sizeof(T) - 1;
template <typename T>
constexpr int kPasses = (kKeyBits<T> + kDigitBits - 1) / kDigitBits;

// The lowest bit of the digit of a pass; of pass -1, the end of all keys.
template <typename T>
BAGUA_HD constexpr int shift_of(int pass) {
  const int shift = kKeyBits<T> - kDigitBits * (pass + 1);
  return shift > 0 ? shift : 0;
}

// The keys that are still undecided begin at `low`; `wanted` of them are among the k largest.
struct KeyRange {
  int64_t low;
  int64_t wanted;
};

// The memory that top-k works in; a multiple of 8 bytes each.
struct TopKScratch {
  uint32_t* histograms;  // kDigits of each pass, 0 to begin with
  KeyRange* ranges;      // before each pass, and the last
  uint64_t* tiles;       // see TileCounts
};

// Counts below 2^32: of larger elements, and of equal ones in the low half.
BAGUA_HD uint64_t counts_of(uint32_t larger, uint32_t equal) {
  return static_cast<uint64_t>(larger) << 32 | equal;
}

// The sum of `value` over the threads of the CTA that come before this one; `total`: over all.
template <typename T>
BAGUA_DEVICE T sum_before(T value, T& total) {
  __shared__ T of_warps[kTopKWarps];
  T sum = value;
  const int lane = lane_index();
  for (int distance = 1; distance < kWarpLanes; distance *= 2) {
    const T other = __shfl_sync(kAllLanes, sum, lane >= distance ? lane - distance : lane);
    if (lane >= distance) sum += other;
  }
  if (lane == kWarpLanes - 1) of_warps[warp_index()] = sum;
  __syncthreads();
  T before = 0;
  total = 0;
  for (int warp = 0; warp < kTopKWarps; ++warp) {
    if (warp < warp_index()) before += of_warps[warp];
    total += of_warps[warp];
  }
  __syncthreads();  // of_warps may be written again
  return before + sum - value;
}

// The range that is left of `range` after `pass`, of which `counts` is the histogram.
template <typename T>
BAGUA_DEVICE KeyRange narrowed_range(const KeyRange& range, const uint32_t* counts, int pass) {
  __shared__ KeyRange result;
  // Thread 0 has the largest digits.
  const int top = kDigits - 1 - static_cast<int>(threadIdx.x) * kDigitsPerThread;
  uint64_t own = 0, total = 0;
  for (int i = 0; i < kDigitsPerThread; ++i) own += counts[top - i];
  uint64_t larger = sum_before(own, total);
  const auto wanted = static_cast<uint64_t>(range.wanted);
  if (larger < wanted && wanted <= larger + own) {
    int digit = top;
    while (larger + counts[digit] < wanted) larger += counts[digit--];
    result.low = range.low + (static_cast<int64_t>(digit) << shift_of<T>(pass));
    result.wanted = static_cast<int64_t>(wanted - larger);
  }
  __syncthreads();
  return result;
}

// The range before `pass`, in all threads; written down for the kernels to come.
template <typename T>
BAGUA_DEVICE KeyRange range_before(const TopKScratch& scratch, int pass, int64_t k) {
  KeyRange range{0, k};
  if (pass > 0) {
    const KeyRange before = pass == 1 ? range : scratch.ranges[pass - 1];
    range = narrowed_range<T>(before, scratch.histograms + (pass - 1) * kDigits, pass - 1);
  }
  if (blockIdx.x == 0 && threadIdx.x == 0) scratch.ranges[pass] = range;
  return range;
}

__global__ void __launch_bounds__(kTopKThreads) zero_words(uint32_t* words, int64_t count) {
  const int64_t step = static_cast<int64_t>(gridDim.x) * blockDim.x;
  for (int64_t i = static_cast<int64_t>(blockIdx.x) * blockDim.x + threadIdx.x; i < count;
       i += step) {
    words[i] = 0;
  }
}

template <typename T>
__global__ void __launch_bounds__(kTopKThreads)
    count_digits(const T* __restrict__ x, int64_t n, int64_t k, int pass, TopKScratch scratch) {
  __shared__ uint32_t counts[kDigits];
  const KeyRange range = range_before<T>(scratch, pass, k);
  for (int digit = threadIdx.x; digit < kDigits; digit += kTopKThreads) counts[digit] = 0;
  __syncthreads();
  const int shift = shift_of<T>(pass);
  const uint64_t width = uint64_t{1} << shift_of<T>(pass - 1);
  for (int64_t tile = blockIdx.x; tile * kTopKTileNumel < n; tile += gridDim.x) {
    BAGUA_UNROLL
    for (int row = 0; row < kTopKRows; ++row) {
      const int64_t i = tile * kTopKTileNumel + row * kTopKThreads + threadIdx.x;
      if (i >= n) continue;
      const auto above = static_cast<uint64_t>(int64_t{key_of(x[i])} - range.low);
      if (above < width) atomicAdd(&counts[above >> shift], 1u);
    }
  }
  __syncthreads();
  uint32_t* const histogram = scratch.histograms + pass * kDigits;
  for (int digit = threadIdx.x; digit < kDigits; digit += kTopKThreads) {
    if (counts[digit] != 0) atomicAdd(&histogram[digit], counts[digit]);
  }
}

// One CTA for each tile.
template <typename T>
__global__ void __launch_bounds__(kTopKThreads)
    count_chosen(const T* __restrict__ x, int64_t n, int64_t k, TopKScratch scratch) {
  const KeyRange range = range_before<T>(scratch, kPasses<T>, k);
  const int64_t begin = static_cast<int64_t>(blockIdx.x) * kTopKTileNumel;
  uint32_t larger = 0, equal = 0;
  BAGUA_UNROLL
  for (int row = 0; row < kTopKRows; ++row) {
    const int64_t i = begin + row * kTopKThreads + threadIdx.x;
    if (i >= n) continue;
    const int64_t key = key_of(x[i]);
    larger += key > range.low ? 1 : 0;
    equal += key == range.low ? 1 : 0;
  }
  uint64_t total = 0;
  sum_before(counts_of(larger, equal), total);
  if (threadIdx.x == 0) scratch.tiles[blockIdx.x] = total;
}

// One CTA for each row of `count` numbers: those before each of them, added up.
__global__ void __launch_bounds__(kTopKThreads) sum_tiles(uint64_t* rows, int64_t count) {
  uint64_t* const tiles = rows + blockIdx.x * count;
  uint64_t before = 0;
  for (int64_t begin = 0; begin < count; begin += kTopKThreads) {
    const int64_t tile = begin + threadIdx.x;
    uint64_t total = 0;
    const uint64_t own = sum_before(tile < count ? tiles[tile] : 0, total);
    if (tile < count) tiles[tile] = before + own;
    before += total;
  }
}

// One CTA for each tile.
template <typename T>
__global__ void __launch_bounds__(kTopKThreads)
    move_chosen(T* __restrict__ x, int64_t n, T* __restrict__ values,
                uint32_t* __restrict__ indices, TopKScratch scratch) {
  constexpr int kCounts = kTopKRows * kTopKWarps;
  static_assert(kCounts <= kTopKThreads);
  __shared__ uint64_t counts[kCounts];  // of each warp in each row, then of all before
  const KeyRange range = scratch.ranges[kPasses<T>];
  const int64_t begin = static_cast<int64_t>(blockIdx.x) * kTopKTileNumel;
  unsigned larger[kTopKRows], equal[kTopKRows];
  BAGUA_UNROLL
  for (int row = 0; row < kTopKRows; ++row) {
    const int64_t i = begin + row * kTopKThreads + threadIdx.x;
    const int64_t key = i < n ? int64_t{key_of(x[i])} : -1;
    larger[row] = __ballot_sync(kAllLanes, key > range.low);
    equal[row] = __ballot_sync(kAllLanes, key == range.low);
    if (lane_index() == 0) {
      counts[row * kTopKWarps + warp_index()] = counts_of(__popc(larger[row]), __popc(equal[row]));
    }
  }
  __syncthreads();
  const bool counts_some = threadIdx.x < kCounts;
  uint64_t total = 0;
  const uint64_t before = sum_before(counts_some ? counts[threadIdx.x] : 0, total);
  if (counts_some) counts[threadIdx.x] = scratch.tiles[blockIdx.x] + before;
  __syncthreads();
  const unsigned lower_lanes = (1u << lane_index()) - 1;
  BAGUA_UNROLL
  for (int row = 0; row < kTopKRows; ++row) {
    const uint64_t ahead = counts[row * kTopKWarps + warp_index()];
    const int64_t equals = static_cast<uint32_t>(ahead) + __popc(equal[row] & lower_lanes);
    const bool is_equal = equal[row] >> lane_index() & 1;
    const bool is_larger = larger[row] >> lane_index() & 1;
    if (!is_larger && !(is_equal && equals < range.wanted)) continue;
    const int64_t place = static_cast<int64_t>(ahead >> 32) + __popc(larger[row] & lower_lanes) +
                          (equals < range.wanted ? equals : range.wanted);
    const int64_t i = begin + row * kTopKThreads + threadIdx.x;
    values[place] = x[i];
    indices[place] = static_cast<uint32_t>(i);
    x[i] = 0;
  }
}

}  // namespace bagua
