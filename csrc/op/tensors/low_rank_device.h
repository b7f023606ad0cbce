// A bucket of LowRank as the kernels of its device take it.
#pragma once

#include <memory>

#include <ATen/core/Tensor.h>

#include "math/low_rank_kernels.h"
#include "op/tensors/low_rank_layout.h"

namespace bagua {

// Thread safety: const after construction, whose copy to the device is ordered on the current
// stream. Ownership: of the plan's memory.
class LowRankDevice {
 public:
  LowRankDevice(const LowRankLayout& layout, at::Device device,
                std::shared_ptr<const LowRankKernels> kernels);

  const LowRankKernels& kernels() const { return *kernels_; }
  const LowRankTable& table() const { return table_; }
  LowRankPlan plan() const;

 private:
  const std::shared_ptr<const LowRankKernels> kernels_;
  const LowRankTable table_;
  at::Tensor copy_;
};

}  // namespace bagua
