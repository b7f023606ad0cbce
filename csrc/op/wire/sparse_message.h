// The payload of a sparse message: some elements of a bucket and where they belong.
#pragma once

#include <string>

#include <ATen/core/Tensor.h>

#include "codec/codec.h"
#include "codec/sparse_codec.h"
#include "op/wire/frame.h"

namespace bagua {

// Where things lie in the message of `k` of `numel` elements (docs/wire-format.md, "Sparse
// messages"): a frame, the values, their indices. Sizes follow from the arguments alone.
class SparseMessage {
 public:
  // `values` is f32 or f64. `codec`: turns them, as f32, into a payload; null: they travel as they
  // are. On the CPU; borrowed.
  SparseMessage(int64_t numel, int64_t k, at::ScalarType values, const Codec* codec = nullptr);

  // Memory that take() and add() work in.
  struct Work {
    at::Tensor indices;  // k elements of kInt
    at::Tensor values;   // k elements of kFloat; with a codec only
  };

  int64_t bytes() const { return kFrameBytes + shape_.values_bytes + shape_.indices_bytes; }
  // Names of the codings of indices and values.
  std::string coding() const;
  // For a device's codec: the part that follows the frame.
  const SparseShape& shape() const { return shape_; }

  // On the CPU: puts the k elements of `m` that are largest, of equals the first (math/top_k.h),
  // into `message`, and in their place what the message loses of them: without a codec zeros.
  void take(at::Tensor& m, at::Tensor message, Work& work) const;

  // On the CPU: sum += what is in `message`, element by element in order of indices. Bytes that
  // take() cannot have written write nothing outside of `sum`, and throw Error.
  void add(const at::Tensor& message, at::Tensor& sum, Work& work) const;

  // The text of such an Error, where a device finds the bytes.
  std::string bad_indices() const;

 private:
  at::Tensor payload_of(const at::Tensor& message) const;
  at::Tensor values_of(const at::Tensor& message) const;
  Chunk chunk_of(const at::Tensor& message, const Work& work) const;
  at::Tensor indices_of(const at::Tensor& message) const;

  at::ScalarType dtype_;
  const Codec* codec_;
  SparseShape shape_;
};

}  // namespace bagua
