// Steps 1 and 5 of LowRankKernels on the bucket: a CTA has a band, a warp a row of it at a time.
//
// Rows of matrices begin anywhere, so lanes have elements of 4 or 8 bytes, neighbouring ones, and
// load several before the first use.
#pragma once

#include <cstdint>

#include "base/device.h"
#include "base/warp.cuh"
#include "math/cuda/low_rank_sums.cuh"
#include "math/low_rank_kernels.h"

namespace bagua {

constexpr int kBandThreads = 128;
constexpr int kBandWarps = kBandThreads / kWarpLanes;
// CTAs per multiprocessor. Left alone the compiler aims at more, and spills.
template <typename W>
inline constexpr int kBandCtas = sizeof(W) == 4 ? 6 : 4;

// LowRankMemory with its types.
template <typename W, typename T>
struct LowRankArrays {
  T* flat;
  const W* error;
  W* work;
  const W* queries;
  W* left;
  W* right;
  W* next_queries;
  W* partials;
  bool* finite;
  W scale;
  W unscale;
  W ranks;
};

// Elements [begin, end) of a range.
struct RangePiece {
  int64_t begin;
  int64_t end;
  BAGUA_DEVICE RangePiece(const LowRankItem& range, int64_t piece)
      : begin(piece * kLowRankBandNumel), end(begin + kLowRankBandNumel) {
    if (end > range.columns) end = range.columns;
  }
};

// Calls function(row) for the calling warp's rows of a band.
template <typename Function>
BAGUA_DEVICE void for_each_row(const LowRankItem& matrix, int64_t band, Function function) {
  const int64_t rows = band_rows(matrix);
  const int64_t begin = band * rows;
  const int64_t end = begin + rows < matrix.rows ? begin + rows : matrix.rows;
  for (int64_t row = begin + warp_index(); row < end; row += kBandWarps) function(row);
}

// One row: M, and its element of each vector of P.
template <typename W, typename T>
BAGUA_DEVICE void project_row(const LowRankItem& matrix, int64_t row,
                              const LowRankArrays<W, T>& arrays) {
  const int64_t columns = matrix.columns, rank = matrix.rank;
  const int64_t at = matrix.offset + row * columns;
  const bool is_stored = arrays.error != nullptr || arrays.unscale != 1 ||
                         static_cast<const void*>(arrays.work) != arrays.flat;
  for (int64_t first = 0; first < rank; first += kRankBlock) {
    W sums[kRankBlock] = {};
    for (int64_t begin = lane_index(); begin < columns; begin += kAhead * kWarpLanes) {
      W m[kAhead] = {};
      BAGUA_UNROLL
      for (int u = 0; u < kAhead; ++u) {
        const int64_t column = begin + u * kWarpLanes;
        if (column >= columns) continue;
        if (first > 0) {
          m[u] = arrays.work[at + column];
        } else {
          m[u] = arrays.unscale * widen(arrays.flat[at + column]);
          if (arrays.error != nullptr) m[u] = arrays.error[at + column] + m[u];
        }
      }
      BAGUA_UNROLL
      for (int u = 0; u < kAhead; ++u) {
        const int64_t column = begin + u * kWarpLanes;
        if (column >= columns) continue;
        if (first == 0 && is_stored) arrays.work[at + column] = m[u];
        BAGUA_UNROLL
        for (int k = 0; k < kRankBlock; ++k) {
          if (first + k >= rank) continue;
          sums[k] += m[u] * arrays.queries[matrix.right + (first + k) * columns + column];
        }
      }
    }
    BAGUA_UNROLL
    for (int k = 0; k < kRankBlock; ++k) {
      if (first + k >= rank) continue;
      const W sum = sum_of_lanes(sums[k]);
      if (lane_index() == 0) arrays.left[matrix.left + (first + k) * matrix.rows + row] = sum;
    }
  }
}

template <typename W, typename T>
__global__ void __launch_bounds__(kBandThreads, kBandCtas<W>)
    project_bands(LowRankPlan plan, LowRankArrays<W, T> arrays) {
  if (blockIdx.x == 0 && threadIdx.x == 0) *arrays.finite = true;
  const LowRankUnit unit = plan.bands[blockIdx.x];
  const LowRankItem item = plan.items[unit.item];
  if (item.rank == 0) {
    const RangePiece piece(item, unit.piece);
    for (int64_t i = piece.begin + threadIdx.x; i < piece.end; i += kBandThreads) {
      arrays.left[item.left + i] = widen(arrays.flat[item.offset + i]) * arrays.unscale;
    }
    return;
  }
  for_each_row(item, unit.piece, [&](int64_t row) { project_row(item, row, arrays); });
}

// One row of the bucket and of its residuals; whether it is finite.
template <typename W, typename T>
BAGUA_DEVICE bool reconstruct_row(const LowRankItem& matrix, int64_t row,
                                  const LowRankArrays<W, T>& arrays) {
  const int64_t columns = matrix.columns;
  const int64_t at = matrix.offset + row * columns;
  bool is_finite = true;
  for (int64_t begin = lane_index(); begin < columns; begin += kAhead * kWarpLanes) {
    W m[kAhead] = {}, products[kAhead] = {};
    BAGUA_UNROLL
    for (int u = 0; u < kAhead; ++u) {
      const int64_t column = begin + u * kWarpLanes;
      if (column < columns && arrays.error != nullptr) m[u] = arrays.work[at + column];
    }
    for (int64_t k = 0; k < matrix.rank; ++k) {
      const W of_row = arrays.left[matrix.left + k * matrix.rows + row];
      BAGUA_UNROLL
      for (int u = 0; u < kAhead; ++u) {
        const int64_t column = begin + u * kWarpLanes;
        if (column >= columns) continue;
        const W product = of_row * arrays.right[matrix.right + k * columns + column];
        products[u] = k == 0 ? product : products[u] + product;
      }
    }
    BAGUA_UNROLL
    for (int u = 0; u < kAhead; ++u) {
      const int64_t column = begin + u * kWarpLanes;
      if (column >= columns) continue;
      const T result = narrow_to<T>(arrays.scale * products[u]);
      is_finite = is_finite && is_finite_value(widen(result));
      arrays.flat[at + column] = result;
      if (arrays.error != nullptr) {
        arrays.work[at + column] = m[u] - arrays.unscale * widen(result);
      }
    }
  }
  return is_finite;
}

template <typename W, typename T>
__global__ void __launch_bounds__(kBandThreads, kBandCtas<W>)
    reconstruct_bands(LowRankPlan plan, LowRankArrays<W, T> arrays) {
  __shared__ int finite_warps[kBandWarps];
  const LowRankUnit unit = plan.bands[blockIdx.x];
  const LowRankItem item = plan.items[unit.item];
  bool is_finite = true;
  if (item.rank == 0) {
    const RangePiece piece(item, unit.piece);
    for (int64_t i = piece.begin + threadIdx.x; i < piece.end; i += kBandThreads) {
      const W mean = arrays.left[item.left + i] / arrays.ranks;
      const T result = narrow_to<T>(mean * arrays.scale);
      is_finite = is_finite && is_finite_value(widen(result));
      arrays.flat[item.offset + i] = result;
      if (arrays.error != nullptr) arrays.work[item.offset + i] = 0;
    }
  } else {
    for_each_row(item, unit.piece, [&](int64_t row) {
      const bool row_is_finite = reconstruct_row(item, row, arrays);
      is_finite = is_finite && row_is_finite;
    });
  }
  const int all = __all_sync(kAllLanes, is_finite);
  if (lane_index() == 0) finite_warps[warp_index()] = all;
  __syncthreads();
  if (threadIdx.x != 0) return;
  for (int warp = 0; warp < kBandWarps; ++warp) {
    if (finite_warps[warp] == 0) *arrays.finite = false;
  }
}

}  // namespace bagua
