// The payload of a sparse message: some elements of a bucket and where they belong.
#pragma once

#include <string>

#include <ATen/core/Tensor.h>

#include "op/wire/frame.h"

namespace bagua {

// Where things lie in the message of `k` of `numel` elements (docs/wire-format.md, "Sparse
// messages"): a frame, the values, their indices. Sizes follow from the arguments alone.
class SparseMessage {
 public:
  // `values` is f32 or f64. On devices other than the CPU indices are always words: packing them
  // there would cost more than it saves.
  SparseMessage(int64_t numel, int64_t k, at::ScalarType values, at::Device device);

  int64_t bytes() const { return kFrameBytes + values_bytes_ + indices_bytes_; }
  std::string coding() const;

  // Puts the k elements of `m` that are largest into `message`, and zeros in their place. On the
  // CPU of equals the first (math/top_k.h); elsewhere any, as at::topk has it.
  // `indices`: k elements of kInt, to work in.
  void take(at::Tensor& m, at::Tensor message, at::Tensor& indices) const;

  // sum += what is in `message`, element by element in order of indices. Bytes that take() cannot
  // have written write nothing outside of `sum`. On the CPU they throw Error; on a device the sum
  // becomes NaN, and one bool that is returned says whether all is well: see bad_indices().
  at::Tensor add(const at::Tensor& message, at::Tensor& sum, at::Tensor& indices) const;
  std::string bad_indices() const;

 private:
  at::Tensor values_of(const at::Tensor& message) const;
  at::Tensor indices_of(const at::Tensor& message) const;
  void take_on_device(at::Tensor& m, at::Tensor& message) const;
  at::Tensor add_on_device(const at::Tensor& message, at::Tensor& sum) const;

  int64_t numel_;
  int64_t k_;
  at::ScalarType dtype_;
  bool on_cpu_;
  int64_t values_bytes_;
  int64_t indices_bytes_;
};

}  // namespace bagua
