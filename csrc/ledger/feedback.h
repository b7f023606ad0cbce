// Error feedback around a value that an op sends.
#pragma once

#include <memory>
#include <utility>

#include "ledger/round_memory.h"

namespace bagua {

// With v the value to be sent and e the residual of the rounds before:
//   1. corrected(): p = v + e, in kept();
//   2. the op sends c, and makes p - c of p where it lies;
//   3. leave(): p - c is the residual, if the whole round was finite.
//
// The residual is a tensor of the memory, in units of v. Tensor 1 is the number of communications
// behind it, one int64 on the CPU. An op that sends twice has two residuals in one memory, which it
// leaves once. Thread safety: used by one lane; kept() and residual() are called before several
// threads work on what they return.
class Feedback {
 public:
  Feedback(std::shared_ptr<RoundMemory> memory, size_t residual)
      : memory_(std::move(memory)), index_(residual) {}

  // e.
  const at::Tensor& residual() { return memory_->value(index_); }
  // Memory of p, and of the residual that follows from it; undefined before it is written.
  at::Tensor& kept() { return memory_->next(index_); }
  // p for v = values / scale, in the residual's dtype.
  at::Tensor corrected(const at::Tensor& values, float scale);
  void leave(int64_t round, const Finite& finite);

 private:
  std::shared_ptr<RoundMemory> memory_;
  size_t index_;
};

// flat += scale * residual, for an op that sends everything. Where the residual is zero, flat keeps
// its bits: those of -0 as well.
void add_residual(at::Tensor& flat, const at::Tensor& residual, float scale);

}  // namespace bagua
