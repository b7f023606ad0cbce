// Values of a device that the host reads when they have long been there.
#pragma once

#include <optional>
#include <utility>
#include <vector>

#include <ATen/core/Tensor.h>

#include "comm/device_stream.h"
#include "comm/host_memory.h"

namespace bagua {

// Thread safety: none. Ownership: of the copies.
class LateValues {
 public:
  // Copies `values` to the host, behind what the current stream has been given.
  void fetch(const at::Tensor& values) {
    at::Tensor copy = host_memory(values.sizes(), values.scalar_type(), values.device());
    copy.copy_(values, /*non_blocking=*/true);
    expect(std::move(copy), values.device());
  }

  // `copy`, of host_memory(), is complete when the current stream of `device` has done what it has
  // been given.
  void expect(at::Tensor copy, at::Device device) {
    fetched_.push_back(std::move(copy));
    if (!until_) until_.emplace(device);
    until_->note_current_stream();
    until_->record();
  }

  // All that was fetched since the last call, in order. Waits where the device is not there yet.
  std::vector<at::Tensor> take() {
    if (!fetched_.empty()) {
      until_->synchronize();
      until_->clear();
    }
    return std::exchange(fetched_, {});
  }

 private:
  std::vector<at::Tensor> fetched_;
  std::optional<StreamPoints> until_;
};

}  // namespace bagua
