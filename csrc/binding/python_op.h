// A bucket op written in Python.
#pragma once

#include <memory>
#include <string>

#include <torch/csrc/utils/pybind.h>

#include "op/contract/bucket_op.h"

namespace bagua {

// Calls `function(bucket_name)` with the GIL, on the lane's thread. The only place where a lane
// holds the GIL. An exception becomes the round's failure, with the Python traceback in its text.
class PythonOp final : public BucketOp {
 public:
  explicit PythonOp(const pybind11::function& function);
  void run(at::Tensor& flat, const Round& round) override;
  std::string describe() const override { return description_; }

 private:
  const std::shared_ptr<pybind11::function> function_;
  const std::string description_;
};

}  // namespace bagua
