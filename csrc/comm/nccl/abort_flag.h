// Keeps results of an aborted collective from being used.
#pragma once

#include <cstdint>

#include <ATen/core/Tensor.h>

namespace bagua {

// Note [Aborted collectives]
// ncclCommAbort frees the stream, with partial results in the tensors, and work that the caller put
// behind the collective, such as an optimizer's step, runs on them. So a flag is raised before the
// abort, and a small kernel behind each bucket's collectives, which reads it, sets all bits of the
// bucket: NaN in every float dtype. AMP then skips the step, checks for finite values find it, and
// no run goes on with wrong numbers. The error itself is thrown by the next call that asks.

// Thread safety: raise() from any thread, the rest from the owner. May fail: the constructor throws
// Error where CUDA refuses.
class AbortFlag final {
 public:
  // On CUDA the flag is in memory that kernels can read. A build without kernels has none.
  explicit AbortFlag(at::Device device);

  void raise() noexcept;

  // Puts work on the current stream that sets all bits of `tensor`, which is contiguous, if the
  // flag is raised by then.
  void guard(at::Tensor& tensor) const;

 private:
  const at::Device device_;
  uint32_t on_host_ = 0;
  uint32_t* word_;  // null: there are no kernels
};

}  // namespace bagua
