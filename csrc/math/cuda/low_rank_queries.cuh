// Steps 3 to 5 of LowRankKernels on Q: a CTA has a tile of a matrix, or a piece of a Q.
#pragma once

#include <cstdint>

#include "base/device.h"
#include "base/warp.cuh"
#include "math/cuda/low_rank_sums.cuh"
#include "math/low_rank_plan.h"

namespace bagua {

constexpr int kProductThreads = 256;
constexpr int kProductWarps = kProductThreads / kWarpLanes;
constexpr int kQueryThreads = static_cast<int>(kLowRankQueryNumel);

// Tiles of a matrix: their parts of Q'.
template <typename W>
__global__ void __launch_bounds__(kProductThreads)
    project_tiles(LowRankPlan plan, const W* __restrict work, const W* __restrict left,
                  W* __restrict partials) {
  __shared__ W of_warps[kProductWarps][kRankBlock][kWarpLanes];
  static_assert(kLowRankTileColumns == kWarpLanes && kRankBlock <= kProductWarps);
  const LowRankUnit unit = plan.tiles[blockIdx.x];
  const LowRankItem matrix = plan.items[unit.item];
  const int64_t tile_row = unit.piece / tile_columns(matrix);
  const int64_t column = unit.piece % tile_columns(matrix) * kLowRankTileColumns + lane_index();
  const bool is_inside = column < matrix.columns;
  const int64_t begin = tile_row * kLowRankTileRows;
  const int64_t end =
      begin + kLowRankTileRows < matrix.rows ? begin + kLowRankTileRows : matrix.rows;
  const W* const m = work + matrix.offset + column;
  const W* const p = left + matrix.left;
  for (int64_t first = 0; first < matrix.rank; first += kRankBlock) {
    W sums[kRankBlock] = {};
    for (int64_t row = begin + warp_index(); row < end; row += kAhead * kProductWarps) {
      W values[kAhead] = {};
      BAGUA_UNROLL
      for (int u = 0; u < kAhead; ++u) {
        const int64_t of_row = row + u * kProductWarps;
        if (of_row < end && is_inside) values[u] = m[of_row * matrix.columns];
      }
      BAGUA_UNROLL
      for (int u = 0; u < kAhead; ++u) {
        const int64_t of_row = row + u * kProductWarps;
        if (of_row >= end) continue;
        BAGUA_UNROLL
        for (int k = 0; k < kRankBlock; ++k) {
          if (first + k >= matrix.rank) continue;
          sums[k] += p[(first + k) * matrix.rows + of_row] * values[u];
        }
      }
    }
    BAGUA_UNROLL
    for (int k = 0; k < kRankBlock; ++k) of_warps[warp_index()][k][lane_index()] = sums[k];
    __syncthreads();
    const int64_t vector = first + warp_index();
    if (warp_index() < kRankBlock && vector < matrix.rank && is_inside) {
      W sum = 0;
      BAGUA_UNROLL
      for (int warp = 0; warp < kProductWarps; ++warp) {
        sum += of_warps[warp][warp_index()][lane_index()];
      }
      partials[matrix.partials + (tile_row * matrix.rank + vector) * matrix.columns + column] = sum;
    }
    __syncthreads();  // of_warps may be written again
  }
}

// Pieces of Q': the sums of their parts.
template <typename W>
__global__ void __launch_bounds__(kQueryThreads)
    join_tiles(LowRankPlan plan, const W* __restrict partials, W* __restrict right) {
  const LowRankUnit unit = plan.queries[blockIdx.x];
  const LowRankItem matrix = plan.items[unit.item];
  const int64_t i = unit.piece * kLowRankQueryNumel + threadIdx.x;
  const int64_t numel = matrix.rank * matrix.columns;
  if (i >= numel) return;
  W sum = 0;
  for (int64_t tile = 0; tile < tile_rows(matrix); ++tile) {
    sum += partials[matrix.partials + tile * numel + i];
  }
  right[matrix.right + i] = sum;
}

// Pieces of Q': the means.
template <typename W>
__global__ void __launch_bounds__(kQueryThreads)
    keep_query_pieces(LowRankPlan plan, const bool* __restrict vanished,
                      const W* __restrict queries, W* __restrict right, W* __restrict next_queries,
                      W ranks) {
  const LowRankUnit unit = plan.queries[blockIdx.x];
  const LowRankItem matrix = plan.items[unit.item];
  const int64_t i = unit.piece * kLowRankQueryNumel + threadIdx.x;
  if (i >= matrix.rank * matrix.columns) return;
  const int64_t at = matrix.right + i;
  const W mean = right[at] / ranks;
  right[at] = mean;
  next_queries[at] = vanished[matrix.vectors + i / matrix.columns] ? queries[at] : mean;
}

}  // namespace bagua
