// Gram-Schmidt on the device: a CTA has a matrix.
#pragma once

#include <cmath>
#include <cstdint>

#include "base/device.h"
#include "base/warp.cuh"
#include "math/cuda/low_rank_sums.cuh"
#include "math/low_rank_plan.h"
#include "math/thin_factors.h"

namespace bagua {

constexpr int kVectorThreads = 512;
// Earlier vectors that a vector loses in one pass over it.
constexpr int kVectorsAtOnce = 4;

// Each value becomes its sum over the threads of a CTA of kVectorThreads, in all of them.
template <int kCount>
BAGUA_DEVICE void sum_over_threads(double (&values)[kCount]) {
  constexpr int kWarps = kVectorThreads / kWarpLanes;
  static_assert(kWarps <= kWarpLanes);  // a lane for the sum of each warp
  __shared__ double of_warp[kVectorsAtOnce][kWarps];
  static_assert(kCount <= kVectorsAtOnce);
  __syncthreads();  // of_warp of the sums before has been read
  BAGUA_UNROLL
  for (int i = 0; i < kCount; ++i) {
    const double own = sum_of_lanes(values[i]);
    if (lane_index() == 0) of_warp[i][warp_index()] = own;
  }
  __syncthreads();
  BAGUA_UNROLL
  for (int i = 0; i < kCount; ++i) {
    values[i] = sum_of_lanes(lane_index() < kWarps ? of_warp[i][lane_index()] : 0.0);
  }
}

BAGUA_DEVICE double norm_of_threads(const double* x, int64_t n) {
  double sum[1] = {};
  for (int64_t i = threadIdx.x; i < n; i += kVectorThreads) sum[0] += x[i] * x[i];
  sum_over_threads(sum);
  return sqrt(sum[0]);
}

// own loses its parts along `count` vectors, which follow each other from `others` on.
BAGUA_DEVICE void lose_parts(double* own, const double* others, int count, int64_t n) {
  double parts[kVectorsAtOnce] = {};
  for (int64_t i = threadIdx.x; i < n; i += kVectorThreads) {
    const double x = own[i];
    BAGUA_UNROLL
    for (int j = 0; j < kVectorsAtOnce; ++j) {
      if (j < count) parts[j] += x * others[j * n + i];
    }
  }
  sum_over_threads(parts);
  for (int64_t i = threadIdx.x; i < n; i += kVectorThreads) {
    double x = own[i];
    BAGUA_UNROLL
    for (int j = 0; j < kVectorsAtOnce; ++j) {
      if (j < count) x -= parts[j] * others[j * n + i];
    }
    own[i] = x;
  }
}

// A matrix: its P. A thread reads and writes the same elements of all vectors.
template <typename W>
__global__ void __launch_bounds__(kVectorThreads, 1)
    orthonormalise_vectors(LowRankPlan plan, W* left, double* vectors, bool* vanished) {
  const LowRankItem matrix = plan.items[blockIdx.x];
  const int64_t n = matrix.rows;
  W* const p = left + matrix.left;
  double* const own_vectors = vectors + matrix.left;
  double bad[1] = {};
  for (int64_t k = 0; k < matrix.rank; ++k) {
    for (int64_t i = threadIdx.x; i < n; i += kVectorThreads) {
      own_vectors[k * n + i] = p[k * n + i];
      if (!is_finite_value(p[k * n + i])) bad[0] = 1;
    }
  }
  sum_over_threads(bad);
  const bool is_finite = bad[0] == 0;
  for (int64_t k = 0; k < matrix.rank; ++k) {
    double* const own = own_vectors + k * n;
    const double before = norm_of_threads(own, n);
    for (int pass = 0; pass < 2; ++pass) {
      for (int64_t j = 0; j < k; j += kVectorsAtOnce) {
        const int count = k - j < kVectorsAtOnce ? static_cast<int>(k - j) : kVectorsAtOnce;
        lose_parts(own, own_vectors + j * n, count, n);
      }
    }
    const double after = norm_of_threads(own, n);
    const bool is_gone = is_finite && !(after > kDependent * before);
    for (int64_t i = threadIdx.x; i < n; i += kVectorThreads) {
      own[i] = is_gone ? 0.0 : own[i] / after;
      p[k * n + i] = is_finite ? static_cast<W>(own[i]) : static_cast<W>(NAN);
    }
    if (threadIdx.x == 0) vanished[matrix.vectors + k] = is_gone;
  }
}

}  // namespace bagua
