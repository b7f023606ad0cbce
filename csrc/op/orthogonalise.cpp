#include "op/orthogonalise.h"

#include <ATen/ops/linalg_vector_norm.h>
#include <ATen/ops/matmul.h>
#include <ATen/ops/ones.h>

namespace bagua {
namespace {

constexpr double kDependent = 1e-10;

at::Tensor length(const at::Tensor& column) {
  return at::linalg_vector_norm(column, 2, {1}, /*keepdim=*/true);
}

}  // namespace

at::Tensor orthogonalise(at::Tensor& batch) {
  at::Tensor columns = batch.to(at::kDouble);
  at::Tensor vanished =
      at::ones({batch.size(0), 1, batch.size(2)}, batch.options().dtype(at::kBool));
  for (int64_t i = 0; i < columns.size(2); ++i) {
    at::Tensor column = columns.narrow(2, i, 1);
    const at::Tensor before = length(column);
    if (i > 0) {
      const at::Tensor done = columns.narrow(2, 0, i);
      for (int pass = 0; pass < 2; ++pass)
        column.sub_(at::matmul(done, at::matmul(done.mT(), column)));
    }
    at::Tensor after = length(column);
    const at::Tensor dependent = after.le(before.mul(kDependent));
    vanished.narrow(2, i, 1).copy_(dependent);
    column.div_(after.masked_fill_(dependent, 1.0)).masked_fill_(dependent, 0.0);
  }
  batch.copy_(columns);
  return vanished;
}

}  // namespace bagua
