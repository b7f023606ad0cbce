// The products of LowRank and orthonormal vectors, on any device.
#pragma once

#include <ATen/core/Tensor.h>

#include "math/low_rank_kernels.h"

namespace bagua {

// Throws std::invalid_argument for a bucket of another dtype.
LowRankDType low_rank_dtype(at::ScalarType type);

// x and m: [rows, columns]; p: [rank, rows]; q: [rank, columns]; all contiguous. x is of the
// bucket's dtype, the others of the one that is computed in. On the CPU equal values give equal
// bits, on any processor and with any number of threads, by our own loops. (The results of MKL
// depend on alignment and threads, and it takes 150 ms for the rank-2 products of 8.7 million
// gradients on one core, where these take 17 ms.) On other devices, unless they have kernels
// (math/low_rank_kernels.h), these are ATen's operations.

// m = error + x / scale; p = q m^T. `error` may be undefined, for none; m may be x.
void project_rows(const at::Tensor& x, double scale, const at::Tensor& error, at::Tensor m,
                  const at::Tensor& q, at::Tensor p);

// q = p m
void project_columns(const at::Tensor& m, const at::Tensor& p, at::Tensor q);

// x = scale p^T q; m -= x / scale, unless m is undefined.
void reconstruct(const at::Tensor& p, const at::Tensor& q, double scale, at::Tensor x,
                 at::Tensor m);

// In place: the vectors of every member of the batch [members, vectors, n] become orthonormal, by
// modified Gram-Schmidt in f64 whatever the dtype, each projected twice. A vector that is zero, or
// that depends on those before it to within 1e-10 of its length, becomes zero; the others span what
// all spanned. Values must be finite.
//
// Returns [members, vectors, 1], bool: whether the vector has become zero.
at::Tensor orthonormalise(at::Tensor batch);

}  // namespace bagua
