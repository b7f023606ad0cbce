// A parameter's gradient and its place in a bucket.
#pragma once

#include <cstdint>
#include <utility>

#include <ATen/core/Tensor.h>
#include <torch/csrc/autograd/function.h>
#include <torch/csrc/autograd/variable.h>

#include "engine/bucket.h"
#include "engine/engine.h"
#include "engine/loan.h"

namespace bagua {

// Number of in-place changes of the tensor's values.
inline uint32_t version_of(const at::Tensor& tensor) {
  return tensor.unsafeGetTensorImpl()->version_counter().current_version();
}

// Note [Adopt]
// A slot's values are taken from whatever .grad is when autograd has accumulated into it.
// kGradView makes .grad an alias of the bucket's memory if no other code can hold the tensor that
// autograd made; another tensor (of the user's, or part of a graph) stays .grad and gets the result
// by value. The alias has a separate storage per slot (Loan), so nothing that a user does to
// `.grad.data` moves the slot, and a holder of it other than .grad gets a private copy before the
// core writes that memory.
// kSparse hands .grad to the op unchanged, and makes the result .grad.
//
// Not thread safe: a slot belongs to the thread that accumulates its gradient, then to the one that
// ends the round.
struct GradientSlot {
  // Effect on .grad at the end of the round.
  enum class Result {
    kInPlace,  // it is the slot's memory
    kCopy,     // it gets the values, or a new tensor where there is none
    kKeep,     // it stays unchanged
  };

  GradientSlot(SlotId number, const Slot& place, const Bucket& bucket);

  // Brings .grad into the memory, scaled; false if there is none. `incoming`: the tensor
  // that autograd passed to the accumulating node; a gradient may share its memory. `lend`: .grad
  // may become an alias of the memory. Throws Error if it does not fit.
  bool adopt(const at::Tensor& incoming, bool lend);

  // Contributes zeros; .grad and its holders keep their values until the result comes.
  void take_nothing();

  // Gives .grad the result.
  void restore();

  bool frozen() const { return !parameter.requires_grad(); }
  // Whether code that is not the core's runs when the gradient has been accumulated.
  bool has_foreign_hooks() const;

  SlotId id;
  const Slot* slot;
  double scale;  // Bucket::adopt_scale
  at::Tensor parameter;
  at::Tensor view;
  Loan loan;
  // The node that accumulates, kept alive; the type of the pointer depends on torch's version.
  decltype(torch::autograd::impl::grad_accumulator(std::declval<at::Tensor>())) node;
  uintptr_t hook = 0;

  // State of the round.
  Result result = Result::kInPlace;
  bool if_used = false;  // the result counts only if some rank used the parameter
  uint32_t version = 0;  // of the parameter, when the backward began
  int hits = 0;          // Note [Static graph]
  int expected_hits = 0;
  bool touched = false;          // a gradient came since the last round, communicated or not
  bool bypassed_output = false;  // a gradient came since the forward, not by its output

 private:
  bool lends() const { return slot->adopt == Adopt::kGradView; }
  void put(const at::Tensor& gradient, double factor);
};

}  // namespace bagua
