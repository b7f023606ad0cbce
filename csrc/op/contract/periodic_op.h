// Operation that a periodic lane repeats during training.
#pragma once

#include <cstdint>
#include <string>

#include <c10/core/Device.h>

namespace bagua {

// Runs on one lane thread, on a device under a stream of the lane's own. May throw: the lane stores
// the error and ends. Fails where it waits for training before a gate that is closed.
class PeriodicOp {
 public:
  virtual ~PeriodicOp() = default;

  enum class Made : uint8_t { kNothing, kAverage, kNonFinite };
  // One round, which all ranks make together. `wants_to_stop`: this rank's wish. kNothing: every
  // rank wants to stop. kNonFinite: an average holds NaN or infinity, for which only host memory is
  // looked through: on a device the look would wait.
  virtual Made run(bool wants_to_stop) = 0;

  // Order device work across the gate: called by the training thread before it leaves the gate,
  // whose current stream run()'s work on the weights then waits for, and after it has entered,
  // whose current stream then waits for run()'s.
  virtual void training_leaves() {}
  virtual void training_enters() {}

  virtual c10::Device device() const = 0;  // of the averaged tensors
  virtual int64_t bytes() const = 0;       // of the averaged tensors
  virtual std::string describe() const = 0;
};

}  // namespace bagua
