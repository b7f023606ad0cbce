// The payload of a sparse message: some elements of a bucket and where they belong.
#pragma once

#include <string>

#include <ATen/core/Tensor.h>

#include "codec/sparse_codec.h"
#include "op/wire/frame.h"

namespace bagua {

// Where things lie in the message of `k` of `numel` elements (docs/wire-format.md, "Sparse
// messages"): a frame, the values, their indices. Sizes follow from the arguments alone.
class SparseMessage {
 public:
  // `values` is f32 or f64.
  SparseMessage(int64_t numel, int64_t k, at::ScalarType values);

  int64_t bytes() const { return kFrameBytes + shape_.values_bytes + shape_.indices_bytes; }
  // Name of the coding of indices.
  std::string coding() const { return index_coding_name(shape_.coding); }
  // For a device's codec: the part that follows the frame.
  const SparseShape& shape() const { return shape_; }

  // On the CPU: puts the k elements of `m` that are largest, of equals the first (math/top_k.h),
  // into `message`, and zeros in their place. `indices`: memory to work in, k elements of kInt.
  void take(at::Tensor& m, at::Tensor message, at::Tensor& indices) const;

  // On the CPU: sum += what is in `message`, element by element in order of indices. Bytes that
  // take() cannot have written write nothing outside of `sum`, and throw Error.
  void add(const at::Tensor& message, at::Tensor& sum, at::Tensor& indices) const;

  // The text of such an Error, where a device finds the bytes.
  std::string bad_indices() const;

 private:
  at::Tensor values_of(const at::Tensor& message) const;
  at::Tensor indices_of(const at::Tensor& message) const;

  at::ScalarType dtype_;
  SparseShape shape_;
};

}  // namespace bagua
