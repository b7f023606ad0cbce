// Memory of an op from round to round.
#pragma once

#include <array>
#include <cstdint>
#include <memory>
#include <mutex>
#include <vector>

#include <ATen/core/Tensor.h>

#include "ledger/late_values.h"
#include "op/tensors/all_finite.h"

namespace bagua {

// Whether the rounds of a plan were finite, in all of its buckets. Shared by the RoundMemory of all
// ops of a plan.
//
// Thread safety: all methods. Rounds follow one another, but while one lane is in a round another
// may not have looked back at the one before: the last two are kept.
class RoundOutcome {
 public:
  // One more memory takes part: at its construction, when no round is under way.
  void join();
  void leave(int64_t round, const Finite& finite);
  // The last round that anyone has left; 0: none.
  int64_t newest();
  // Whether everyone has left round `round`, and it was finite for all. Waits for a device that
  // has not come to the end of that round.
  bool finite(int64_t round);

 private:
  struct Entry {
    int64_t round = 0;
    int64_t left = 0;
    bool finite = true;
    LateValues flags;  // of tensors on a device
  };
  std::mutex mutex_;
  int64_t members_ = 0;
  std::array<Entry, 2> entries_;
};

// Tensors that an op changes in a round; the changes count only if the whole round was finite.
//
// Note [Memory commits with the round]
// Under a GradScaler an overflow in one bucket makes the optimizer skip the step, and what the
// other buckets sent is thrown away with it. So no op may commit its state before the results of
// all buckets of the round are known. Every tensor exists twice: an op reads value(i), writes
// next(i) and reports with leave(round, finite) whether its bucket is finite on all ranks, which
// all ranks derive alike from the received data. The next access (the op in its next round, or the
// algorithm for a checkpoint) exchanges the two if the round was finite everywhere. A round
// that failed or stayed incomplete changes nothing. On a device nobody waits to learn whether a
// round is finite: the flag is read at the next access, when it has long been there.
//
// Thread safety: used by one lane in a round, by anyone between rounds. Ownership: the tensors
// given are the memory's; set() copies into them.
class RoundMemory {
 public:
  RoundMemory(std::vector<at::Tensor> initial, std::shared_ptr<RoundOutcome> outcome);

  size_t size() const { return values_.size(); }
  // Value after the last round that was finite in all buckets. Valid until the next round begins.
  const at::Tensor& value(size_t i);
  // Memory for the new value, to be written before leave(); undefined until then.
  at::Tensor& next(size_t i);
  void leave(int64_t round, const Finite& finite);
  // Between rounds: discards uncommitted values and copies `value`. Throws
  // std::invalid_argument where shape or dtype differ.
  void set(size_t i, const at::Tensor& value);

 private:
  void settle();

  std::vector<at::Tensor> values_;
  std::vector<at::Tensor> next_;
  std::shared_ptr<RoundOutcome> outcome_;
  int64_t pending_ = 0;  // the round that wrote next_; 0: none
};

}  // namespace bagua
