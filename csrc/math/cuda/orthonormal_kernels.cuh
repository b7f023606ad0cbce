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

constexpr int kVectorThreads = 256;

// The sum over the threads of a CTA of kVectorThreads, in all of them.
BAGUA_DEVICE double sum_of_threads(double value) {
  __shared__ double of_warp[kVectorThreads / kWarpLanes];
  const double own = sum_of_lanes(value);
  __syncthreads();  // of_warp of the sum before has been read
  if (lane_index() == 0) of_warp[warp_index()] = own;
  __syncthreads();
  double sum = 0;
  BAGUA_UNROLL
  for (int warp = 0; warp < kVectorThreads / kWarpLanes; ++warp) sum += of_warp[warp];
  return sum;
}

BAGUA_DEVICE double dot_of_threads(const double* x, const double* y, int64_t n) {
  double sum = 0;
  for (int64_t i = threadIdx.x; i < n; i += kVectorThreads) sum += x[i] * y[i];
  return sum_of_threads(sum);
}

// A matrix: its P. A thread reads and writes the same elements of all vectors.
template <typename W>
__global__ void __launch_bounds__(kVectorThreads)
    orthonormalise_vectors(LowRankPlan plan, W* left, double* vectors, bool* vanished) {
  const LowRankItem matrix = plan.items[blockIdx.x];
  const int64_t n = matrix.rows;
  W* const p = left + matrix.left;
  double* const own_vectors = vectors + matrix.left;
  double bad = 0;
  for (int64_t k = 0; k < matrix.rank; ++k) {
    for (int64_t i = threadIdx.x; i < n; i += kVectorThreads) {
      own_vectors[k * n + i] = p[k * n + i];
      if (!is_finite_value(p[k * n + i])) bad = 1;
    }
  }
  const bool is_finite = sum_of_threads(bad) == 0;
  for (int64_t k = 0; k < matrix.rank; ++k) {
    double* const own = own_vectors + k * n;
    const double before = sqrt(dot_of_threads(own, own, n));
    for (int pass = 0; pass < 2; ++pass) {
      for (int64_t j = 0; j < k; ++j) {
        const double* const other = own_vectors + j * n;
        const double part = -dot_of_threads(own, other, n);
        for (int64_t i = threadIdx.x; i < n; i += kVectorThreads) own[i] += part * other[i];
      }
    }
    const double after = sqrt(dot_of_threads(own, own, n));
    const bool is_gone = is_finite && !(after > kDependent * before);
    for (int64_t i = threadIdx.x; i < n; i += kVectorThreads) {
      own[i] = is_gone ? 0.0 : own[i] / after;
      p[k * n + i] = is_finite ? static_cast<W>(own[i]) : static_cast<W>(NAN);
    }
    if (threadIdx.x == 0) vanished[matrix.vectors + k] = is_gone;
  }
}

}  // namespace bagua
