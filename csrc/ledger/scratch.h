// Memory that the ops of one lane share, allocated once.
#pragma once

#include <array>

#include <ATen/core/Tensor.h>
#include <ATen/ops/empty.h>

namespace bagua {

// Fresh buffers cost more in page faults than any codec kernel, so a lane keeps its own and they
// only grow. Thread safety: used by the one lane that owns it. A buffer is valid until the next
// get() for the same use.
class Scratch {
 public:
  enum Use { kSend, kReceive, kSum, kCast, kScaled, kIndices, kValues, kCodec, kUses };

  at::Tensor get(Use use, int64_t numel, at::ScalarType dtype, at::Device device) {
    at::Tensor& buffer = buffers_[use];
    if (!buffer.defined() || buffer.numel() < numel || buffer.scalar_type() != dtype ||
        buffer.device() != device) {
      buffer = at::empty({numel}, at::TensorOptions().dtype(dtype).device(device));
    }
    return buffer.narrow(0, 0, numel);
  }

 private:
  std::array<at::Tensor, kUses> buffers_;
};

}  // namespace bagua
