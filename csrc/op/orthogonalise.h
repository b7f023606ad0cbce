// Orthonormal columns, for the factors of a low-rank approximation.
#pragma once

#include <ATen/core/Tensor.h>

namespace bagua {

// In place: the columns of every matrix of the batch [matrices, rows, columns] become orthonormal,
// by modified Gram-Schmidt, each column projected twice, in f64 whatever the dtype. A column that
// is zero, or that depends on those before it to within 1e-10 of its length, becomes zero; the
// others span what the columns spanned. Values must be finite.
//
// Returns [matrices, 1, columns], bool: whether the column has become zero.
//
// The result depends on the values alone, so equal values give equal bits on machines of one kind.
at::Tensor orthogonalise(at::Tensor& batch);

}  // namespace bagua
