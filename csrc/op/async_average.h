// The mean of all ranks' weights, added to weights that are being trained meanwhile.
#pragma once

#include <memory>
#include <vector>

#include <ATen/core/Tensor.h>

#include "base/weight_gate.h"
#include "comm/communicator.h"
#include "comm/device_stream.h"
#include "op/contract/periodic_op.h"

namespace bagua {

// Asynchronous model averaging (Bagua, VLDB 2022, "async"; the update keeps what each rank learnt
// while the bytes travelled):
//   1. all_reduce(MIN) of one byte, "I want to stop": if all do, done;
//   2. in the gate: snapshot = weights;
//   3. mean = all_reduce(AVG) of the snapshot, outside the gate, until it is there;
//   4. in the gate: weights = (weights - snapshot) + mean.
// Where no rank trains between 2 and 4 all hold the same bits afterwards. f16 and bf16 weights
// travel and are averaged in f32, and are rounded once, in step 4.
//
// Ownership: the weights' memory is shared with training, Note [Gate]. On a device the two sides
// order their streams by events as they pass the gate; inside it the host waits for nothing,
// neither for the network nor for training's kernels. All weights are on one device. Memory: two
// copies of the weights (f32 for f16 and bf16). Bytes sent per rank: 2 S (P - 1) / P of those, and
// the byte of step 1. May fail: std::invalid_argument for weights that are not contiguous and
// floating; what the communicator throws, after which the weights are as training left them.
class AsyncAverage final : public PeriodicOp {
 public:
  AsyncAverage(std::shared_ptr<Communicator> communicator, std::vector<at::Tensor> weights,
               std::shared_ptr<WeightGate> gate);
  Made run(bool wants_to_stop) override;
  void training_leaves() override { trained_.mark_current_stream(); }
  void training_enters() override;
  at::Device device() const override;
  int64_t bytes() const override;
  std::string describe() const override;

 private:
  struct Part {
    at::Tensor weights;
    at::Tensor snapshot;
    at::Tensor mean;
  };
  template <typename Body>
  void in_the_gate(Body body);
  static void apply(Part& part);
  bool averages_are_finite() const;

  std::shared_ptr<Communicator> communicator_;
  std::shared_ptr<WeightGate> gate_;
  std::vector<Part> parts_;
  // Guarded by the gate.
  StreamPoints trained_;   // end of training's work when it left last
  StreamPoints averaged_;  // end of run()'s work when it left last
};

}  // namespace bagua
