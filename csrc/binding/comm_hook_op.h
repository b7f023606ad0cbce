// A bucket op that is a communication hook of torch's DistributedDataParallel.
#pragma once

#include <memory>
#include <string>
#include <vector>

#include <torch/csrc/distributed/c10d/python_comm_hook.h>
#include <torch/csrc/utils/pybind.h>

#include "op/contract/bucket_op.h"

namespace bagua {

// Position of the bucket among all, and its contents.
struct HookedBucket {
  size_t index;  // in launch order
  size_t count;
  std::vector<at::Tensor> parameters;  // in the order of the slots
  std::vector<size_t> offsets;         // elements from the start of the flat memory
};

// Calls `hook(state, torch.distributed.GradBucket)` with the GIL, waits for the future that it
// returns without, and copies the result into the bucket. The hook communicates as it likes, with
// separate process groups; so all hooked buckets belong in one lane, or ranks would issue their
// operations in different orders. An exception of the hook becomes the round's failure.
class CommHookOp final : public BucketOp {
 public:
  CommHookOp(pybind11::function hook, pybind11::object state, HookedBucket bucket);
  void run(at::Tensor& flat, const Round& round) override;
  std::string describe() const override { return description_; }

 private:
  HookedBucket bucket_;
  std::string description_;
  std::shared_ptr<c10d::PythonCommHook> hook_;
};

}  // namespace bagua
