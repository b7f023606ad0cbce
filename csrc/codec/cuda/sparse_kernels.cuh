// The kernels that code and sum sparse messages.
#pragma once

#include <cstdint>
#include <limits>

#include "base/device.h"
#include "codec/cuda/top_k_kernels.cuh"
#include "codec/index_words.h"
#include "codec/sparse_codec.h"

namespace bagua {

constexpr int kRanksAtOnce = 128;
constexpr int64_t kBitmapTileBits = 32 * kTopKThreads;

template <typename T>
constexpr T kNan = std::numeric_limits<T>::quiet_NaN();

// The messages, for the kernels that read them.
struct SparseSource {
  SparseMessages messages;
  int64_t values_bytes;

  BAGUA_DEVICE const std::byte* values(int64_t rank) const {
    return messages.first + rank * messages.stride;
  }
  BAGUA_DEVICE const uint32_t* indices(int64_t rank) const {
    return reinterpret_cast<const uint32_t*>(values(rank) + values_bytes);
  }
};

// The coded indices, and zeros behind the values.
__global__ void __launch_bounds__(kTopKThreads)
    code_indices(const uint32_t* __restrict__ indices, SparseShape shape, uint32_t* values,
                 uint32_t* coded) {
  const int64_t word = static_cast<int64_t>(blockIdx.x) * blockDim.x + threadIdx.x;
  const int64_t used = shape.k * shape.element_bytes / 4;
  if (used + word < shape.values_bytes / 4) values[used + word] = 0;
  if (word >= shape.indices_bytes / 4) return;
  coded[word] = coded_word(shape.coding, indices, shape.k, shape.bits, word);
}

// The indices of packed ones: `tiles` CTAs for each rank.
__global__ void __launch_bounds__(kTopKThreads)
    read_packed(SparseSource source, SparseShape shape, int64_t tiles, uint32_t* indices,
                int32_t* faults) {
  const int64_t rank = blockIdx.x / tiles, tile = blockIdx.x % tiles;
  const uint32_t* const coded = source.indices(rank);
  const int64_t words = shape.indices_bytes / 4;
  for (int row = 0; row < kTopKRows; ++row) {
    const int64_t i = tile * kTopKTileNumel + row * kTopKThreads + threadIdx.x;
    if (i >= shape.k) return;
    const uint32_t index = packed_index(coded, words, shape.bits, i);
    indices[rank * shape.k + i] = index;
    const bool ascends = i == 0 || packed_index(coded, words, shape.bits, i - 1) < index;
    if (index >= shape.numel || !ascends) atomicAdd(&faults[rank], 1);
  }
}

// A thread's word of a tile of a bitmap, without what is behind the last element's byte.
BAGUA_DEVICE uint32_t bitmap_word(const uint32_t* coded, int64_t numel, int64_t tile) {
  const int64_t bits = (numel + 7) / 8 * 8;
  const int64_t first = tile * kBitmapTileBits + 32 * static_cast<int64_t>(threadIdx.x);
  if (first >= bits) return 0;
  const uint32_t word = coded[first / 32];
  return bits - first < 32 ? word & ((1u << (bits - first)) - 1) : word;
}

// How many elements each tile of the bitmaps has: `tiles` CTAs for each rank.
__global__ void __launch_bounds__(kTopKThreads)
    count_bits(SparseSource source, SparseShape shape, int64_t tiles, uint64_t* counts) {
  const int64_t rank = blockIdx.x / tiles, tile = blockIdx.x % tiles;
  uint64_t total = 0;
  sum_before(uint64_t(__popc(bitmap_word(source.indices(rank), shape.numel, tile))), total);
  if (threadIdx.x == 0) counts[blockIdx.x] = total;
}

// The indices of a bitmap: `tiles` CTAs for each rank. before: how many elements lie before each
// tile.
__global__ void __launch_bounds__(kTopKThreads)
    read_bitmap(SparseSource source, SparseShape shape, int64_t tiles,
                const uint64_t* __restrict__ before, uint32_t* indices, int32_t* faults) {
  const int64_t rank = blockIdx.x / tiles, tile = blockIdx.x % tiles;
  const int64_t first = tile * kBitmapTileBits + 32 * static_cast<int64_t>(threadIdx.x);
  uint32_t word = bitmap_word(source.indices(rank), shape.numel, tile);
  uint64_t total = 0;
  int64_t place =
      static_cast<int64_t>(before[blockIdx.x] + sum_before(uint64_t(__popc(word)), total));
  bool is_outside = false;
  for (; word != 0; word &= word - 1, ++place) {
    const int64_t index = first + __popc((word & -word) - 1);
    is_outside = is_outside || index >= shape.numel;
    if (place < shape.k) indices[rank * shape.k + place] = static_cast<uint32_t>(index);
  }
  const bool is_last = tile == tiles - 1 && threadIdx.x == 0;
  const bool is_short = is_last && static_cast<int64_t>(before[blockIdx.x] + total) != shape.k;
  if (is_outside || is_short) atomicAdd(&faults[rank], 1);
}

// The sum of all ranks' values: one CTA for each tile of it, rank after rank. Of indices that have
// a fault none is used.
template <typename T>
__global__ void __launch_bounds__(kTopKThreads)
    sum_values(SparseSource source, int64_t numel, int64_t k, const uint32_t* __restrict__ indices,
               const int32_t* __restrict__ faults, T* __restrict__ sum) {
  __shared__ T tile[kTopKTileNumel];
  __shared__ uint32_t bounds[2 * kRanksAtOnce];  // of each rank's elements in the tile
  const int64_t begin = static_cast<int64_t>(blockIdx.x) * kTopKTileNumel;
  const int thread = threadIdx.x;
  for (int i = thread; i < kTopKTileNumel; i += kTopKThreads) tile[i] = 0;
  for (int64_t first = 0; first < source.messages.ranks; first += kRanksAtOnce) {
    const int64_t left = source.messages.ranks - first;
    const int ranks = static_cast<int>(left < kRanksAtOnce ? left : kRanksAtOnce);
    for (int i = thread; i < 2 * ranks; i += kTopKThreads) {
      bounds[i] = static_cast<uint32_t>(
          first_from(indices + (first + i / 2) * k, k, begin + i % 2 * kTopKTileNumel));
    }
    __syncthreads();
    for (int i = 0; i < ranks; ++i) {
      const uint32_t* const own = indices + (first + i) * k;
      const T* const values = reinterpret_cast<const T*>(source.values(first + i));
      if (faults[first + i] != 0) {
        for (int at = thread; at < kTopKTileNumel; at += kTopKThreads) tile[at] = kNan<T>;
      } else {
        for (int64_t at = int64_t{bounds[2 * i]} + thread; at < bounds[2 * i + 1];
             at += kTopKThreads) {
          tile[own[at] - begin] += values[at];
        }
      }
      __syncthreads();
    }
  }
  for (int i = thread; i < kTopKTileNumel; i += kTopKThreads) {
    if (begin + i < numel) sum[begin + i] = tile[i];
  }
}

}  // namespace bagua
