// Residual of an op that sends a part of its bucket, added in the next round.
#pragma once

#include <memory>

#include "ledger/feedback.h"
#include "ledger/round_memory.h"
#include "ledger/scratch.h"
#include "op/contract/bucket_op.h"
#include "op/tensors/arithmetic_dtype.h"

namespace bagua {

// Error feedback (Karimireddy et al., ICML 2019, Algorithm 2, in units of gradients). With s the
// round's grad_scale, g the bucket, e the error and P the number of ranks:
//   1. corrected(): m = g / s + e;
//   2. the op sends a part c of m, and sums what all ranks sent;
//   3. finish(): g <- sum * s / P in the bucket's dtype;  e <- m - c.
// Arithmetic and memory are f32, f64 for f64 buckets. Elements are sent as m has them, so that
// m = c + e holds bit by bit, or through a codec. A result that is not finite leaves the memory as
// it was: all ranks hold the same result, and decide alike (Note [Memory commits with the round]).
//
// Ownership: the memory is shared with the algorithm. Its tensors are e, as long as the bucket and
// on its device (empty: nothing is remembered), and the number of communications behind it, one
// int64 on the CPU. Thread safety: used by one lane.
class ErrorFeedback {
 public:
  // `op` is for error messages. Throws std::invalid_argument for memory of another form.
  ErrorFeedback(const char* op, int64_t numel, std::shared_ptr<RoundMemory> memory,
                std::shared_ptr<Scratch> scratch);

  int64_t numel() const { return numel_; }
  bool remembers() const { return remembers_; }
  at::Device device() const;  // of e

  // Throws std::invalid_argument, naming the bucket, where it does not fit the memory.
  void check(const at::Tensor& flat, const Round& round) const;
  // m. Its contents at finish() become the residual: set sent elements to zero.
  at::Tensor corrected(const at::Tensor& flat, const Round& round);
  // Memory for the sum: the bucket itself where its dtype allows.
  at::Tensor sum(at::Tensor& flat);
  void finish(at::Tensor& flat, at::Tensor& sum, int ranks, const Round& round);

  // For an op that sends everything, instead of corrected() and finish(): g <- g + s e, and e <- 0.
  void add_and_clear(at::Tensor& flat, const Round& round);
  // At the end of a round: it counts if the bucket, equal on all ranks, is finite.
  void leave(const at::Tensor& flat, const Round& round);

 private:
  enum Kept { kError, kCommunications };

  int64_t numel_;
  bool remembers_;
  at::ScalarType dtype_;
  std::shared_ptr<RoundMemory> memory_;
  Feedback feedback_;
  std::shared_ptr<Scratch> scratch_;
};

}  // namespace bagua
