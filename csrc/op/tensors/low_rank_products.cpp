#include "op/tensors/low_rank_products.h"

#include <algorithm>
#include <utility>

#include <ATen/Parallel.h>
#include <ATen/ops/add.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/linalg_vector_norm.h>
#include <ATen/ops/matmul.h>
#include <ATen/ops/mm.h>

#include "base/check.h"
#include "base/dtype.h"
#include "math/thin_factors.h"

namespace bagua {
namespace {

// Elements that are worth a separate thread.
constexpr int64_t kGrainNumel = 65536;

template <typename T>
T* pointer(const at::Tensor& tensor) {
  return tensor.defined() ? static_cast<T*>(tensor.data_ptr()) : nullptr;
}

ThinShape shape_of(const at::Tensor& matrix, const at::Tensor& p) {
  return {matrix.size(0), matrix.size(1), p.size(0)};
}

int64_t grain(int64_t numel_per_item) {
  return std::max<int64_t>(1, kGrainNumel / std::max<int64_t>(1, numel_per_item));
}

at::Tensor length(const at::Tensor& vector) {
  return at::linalg_vector_norm(vector, 2, {2}, /*keepdim=*/true);
}

at::Tensor orthonormalise_anywhere(at::Tensor& vectors) {
  at::Tensor vanished =
      at::empty({vectors.size(0), vectors.size(1), 1}, vectors.options().dtype(at::kBool));
  for (int64_t i = 0; i < vectors.size(1); ++i) {
    at::Tensor vector = vectors.narrow(1, i, 1);
    const at::Tensor before = length(vector);
    const at::Tensor done = vectors.narrow(1, 0, i);
    for (int pass = 0; pass < 2 && i > 0; ++pass) {
      vector.sub_(at::matmul(at::matmul(vector, done.mT()), done));
    }
    at::Tensor after = length(vector);
    const at::Tensor dependent = after.le(before.mul(kDependent));
    vanished.narrow(1, i, 1).copy_(dependent);
    vector.div_(after.masked_fill_(dependent, 1.0)).masked_fill_(dependent, 0.0);
  }
  return vanished;
}

}  // namespace

LowRankDType low_rank_dtype(at::ScalarType type) {
  switch (type) {
    case at::kDouble:
      return LowRankDType::kFloat64;
    case at::kHalf:
      return LowRankDType::kFloat16;
    case at::kBFloat16:
      return LowRankDType::kBFloat16;
    case at::kFloat:
      return LowRankDType::kFloat32;
    default:
      BAGUA_CHECK_ARG(false, "low-rank products take floating tensors, not ", c10::toString(type),
                      ".");
  }
}

void project_rows(const at::Tensor& x, double scale, const at::Tensor& error, at::Tensor m,
                  const at::Tensor& q, at::Tensor p) {
  if (!x.is_cpu()) {
    if (error.defined()) {
      at::add_out(m, error, x, 1.0 / scale);
    } else if (scale != 1.0 || m.data_ptr() != x.data_ptr()) {
      m.copy_(x).mul_(1.0 / scale);
    }
    at::mm_out(p, q, m.t());
    return;
  }
  visit_low_rank(low_rank_dtype(x.scalar_type()), [&]<typename W, typename T>(W, T) {
    const ThinShape shape = shape_of(x, p);
    at::parallel_for(0, shape.rows, grain(shape.columns), [&](int64_t begin, int64_t end) {
      project_rows<W, T>(pointer<T>(x), static_cast<W>(1.0 / scale), pointer<W>(error),
                         pointer<W>(m), pointer<W>(q), pointer<W>(p), shape, begin, end);
    });
  });
}

void project_columns(const at::Tensor& m, const at::Tensor& p, at::Tensor q) {
  if (!m.is_cpu()) {
    at::mm_out(q, p, m);
    return;
  }
  visit_low_rank(low_rank_dtype(m.scalar_type()), [&]<typename W, typename T>(W, T) {
    const ThinShape shape = shape_of(m, p);
    at::parallel_for(0, shape.columns, grain(shape.rows), [&](int64_t begin, int64_t end) {
      project_columns<W>(pointer<W>(m), pointer<W>(p), pointer<W>(q), shape, begin, end);
    });
  });
}

void reconstruct(const at::Tensor& p, const at::Tensor& q, double scale, at::Tensor x,
                 at::Tensor m) {
  if (!x.is_cpu()) {
    x.copy_(at::mm(p.t(), q).mul_(scale));
    if (m.defined()) m.sub_(x, 1.0 / scale);
    return;
  }
  visit_low_rank(low_rank_dtype(x.scalar_type()), [&]<typename W, typename T>(W, T) {
    const ThinShape shape = shape_of(x, p);
    at::parallel_for(0, shape.rows, grain(shape.columns), [&](int64_t begin, int64_t end) {
      reconstruct_rows<W, T>(pointer<W>(p), pointer<W>(q), static_cast<W>(scale), pointer<T>(x),
                             pointer<W>(m), shape, begin, end);
    });
  });
}

at::Tensor orthonormalise(at::Tensor batch) {
  at::Tensor vectors = batch.to(at::kDouble);
  const int64_t members = batch.size(0), count = batch.size(1), n = batch.size(2);
  at::Tensor vanished;
  if (batch.is_cpu()) {
    vanished = at::empty({members, count, 1}, batch.options().dtype(at::kBool));
    at::parallel_for(0, members, grain(count * count * n), [&](int64_t begin, int64_t end) {
      for (int64_t i = begin; i < end; ++i) {
        orthonormalise(vectors.mutable_data_ptr<double>() + i * count * n, count, n,
                       vanished.mutable_data_ptr<bool>() + i * count);
      }
    });
  } else {
    vanished = orthonormalise_anywhere(vectors);
  }
  batch.copy_(vectors);
  return vanished;
}

}  // namespace bagua
