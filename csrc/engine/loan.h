// Tensors that share a slot's memory through a separate storage.
#pragma once

#include <ATen/core/Tensor.h>

namespace bagua {

// The memory of one slot, lent out as `.grad`.
//
// All tensors that alias() has made, and every view that their holders make of them, share one
// storage, which is not the bucket's. So the loan knows how many hold it, and can give all of them
// a private copy at once. Not thread safe.
class Loan {
 public:
  explicit Loan(at::Tensor view) : view_(std::move(view)) {}

  // A new tensor on the memory.
  at::Tensor alias();

  // Whether `tensor` is on the memory as a whole, in the slot's own layout, through this loan.
  bool is_alias(const at::Tensor& tensor) const;

  // From now on the holders of aliases have separate memory, with the same values; the slot's
  // memory belongs to the bucket alone. Without a holder nothing is copied.
  void recall();

 private:
  at::Tensor view_;
  c10::Storage storage_{};  // of the aliases; none before the first
};

}  // namespace bagua
