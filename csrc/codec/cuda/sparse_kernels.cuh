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

// The indices of packed ones or words: `tiles` CTAs for each rank.
__global__ void __launch_bounds__(kTopKThreads)
    read_packed(SparseSource source, SparseShape shape, int64_t tiles, uint32_t* indices,
                int32_t* faults) {
  const int64_t rank = blockIdx.x / tiles, tile = blockIdx.x % tiles;
  const uint32_t* const coded = source.indices(rank);
  const int64_t words = shape.indices_bytes / 4;
  const int bits = shape.coding == IndexCoding::kWords ? 32 : shape.bits;
  for (int row = 0; row < kTopKRows; ++row) {
    const int64_t i = tile * kTopKTileNumel + row * kTopKThreads + threadIdx.x;
    if (i >= shape.k) return;
    const uint32_t index = packed_index(coded, words, bits, i);
    indices[rank * shape.k + i] = index;
    const bool ascends = i == 0 || packed_index(coded, words, bits, i - 1) < index;
    if (index >= shape.numel || !ascends) atomicAdd(&faults[rank], 1);
  }
}

// The indices of a bitmap: one CTA for each rank.
__global__ void __launch_bounds__(kTopKThreads)
    read_bitmap(SparseSource source, SparseShape shape, uint32_t* indices, int32_t* faults) {
  const int64_t rank = blockIdx.x;
  const uint32_t* const coded = source.indices(rank);
  const int64_t bits = (shape.numel + 7) / 8 * 8;  // what is behind is padding
  int64_t before = 0;
  bool is_outside = false;
  for (int64_t begin = 0; begin < bits; begin += 32 * kTopKThreads) {
    const int64_t first = begin + 32 * threadIdx.x;
    uint32_t word = first < bits ? coded[first / 32] : 0;
    if (first < bits && bits - first < 32) word &= (1u << (bits - first)) - 1;
    uint64_t total = 0;
    int64_t place = before + static_cast<int64_t>(sum_before(uint64_t(__popc(word)), total));
    for (; word != 0; word &= word - 1, ++place) {
      const int64_t index = first + __popc((word & -word) - 1);
      is_outside = is_outside || index >= shape.numel;
      if (place < shape.k) indices[rank * shape.k + place] = static_cast<uint32_t>(index);
    }
    before += static_cast<int64_t>(total);
  }
  const bool is_short = threadIdx.x == 0 && before != shape.k;
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
