#include "comm/nccl/abort_flag.h"

#include <atomic>
#include <cstring>

#include <c10/core/DeviceGuard.h>

#include "base/check.h"
#include "comm/device_stream.h"
#include "comm/nccl/fill_if_set.h"

namespace bagua {

AbortFlag::AbortFlag(at::Device device) : device_(device), word_(&on_host_) {
  if (device_.is_cpu()) return;
  const c10::DeviceGuard on_device(device_);
  word_ = make_device_flag();
}

void AbortFlag::raise() noexcept {
  if (word_) std::atomic_ref(*word_).store(1);
}

void AbortFlag::guard(at::Tensor& tensor) const {
  BAGUA_CHECK_ARG(tensor.device() == device_ && tensor.is_contiguous(),
                  "invalidate_if_aborted takes a contiguous tensor on ", device_.str());
  if (!word_ || tensor.numel() == 0) return;
  if (device_.is_cpu()) {
    if (std::atomic_ref(*word_).load() != 0) std::memset(tensor.data_ptr(), 0xff, tensor.nbytes());
    return;
  }
  const c10::DeviceGuard on_device(device_);
  fill_if_set(word_, static_cast<std::byte*>(tensor.data_ptr()),
              static_cast<int64_t>(tensor.nbytes()), current_stream_handle(device_));
}

}  // namespace bagua
