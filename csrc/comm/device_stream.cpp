#include "comm/device_stream.h"

#include <algorithm>
#include <exception>

#include <c10/core/impl/VirtualGuardImpl.h>
#include <dlfcn.h>

#include "base/check.h"

namespace bagua {
namespace {

c10::impl::VirtualGuardImpl runtime_of(c10::Device device) {
  return c10::impl::VirtualGuardImpl(device.type());
}

// A function of CUDA's driver, or null. libcuda is asked by name: whoever has a CUDA device has
// loaded it.
template <typename Signature>
Signature* driver_function(const char* name) {
  void* const driver = dlopen("libcuda.so.1", RTLD_NOW | RTLD_NOLOAD);
  return driver ? reinterpret_cast<Signature*>(dlsym(driver, name)) : nullptr;
}

}  // namespace

c10::Stream current_stream(c10::Device device) { return runtime_of(device).getStream(device); }

void* current_stream_handle(c10::Device device) {
  if (device.is_cpu()) return nullptr;
  return current_stream(device).native_handle();
}

std::optional<c10::Stream> side_stream(c10::Device device) {
  if (device.is_cpu()) return std::nullopt;
  return runtime_of(device).getStreamFromGlobalPool(device, /*isHighPriority=*/true);
}

TriedDeviceGuard::TriedDeviceGuard(c10::Device device) noexcept {
  try {
    guard_.emplace(device);
  } catch (const std::exception&) {
    // Whoever uses the device next is told.
  }
}

void leave_captures_of_others_alone() {
  int thread_local_mode = 1;  // CU_STREAM_CAPTURE_MODE_THREAD_LOCAL
  if (const auto exchange = driver_function<int(int*)>("cuThreadExchangeStreamCaptureMode")) {
    exchange(&thread_local_mode);
  }
}

void refuse_capture(c10::Device device) {
  if (device.is_cpu()) return;
  int status = 0;  // CU_STREAM_CAPTURE_STATUS_NONE
  // Looked up once: each round asks.
  static auto* const ask = driver_function<int(void*, int*)>("cuStreamIsCapturing");
  if (ask) {
    ask(current_stream_handle(device), &status);
  }
  BAGUA_CHECK(status == 0,
              "a CUDA graph is being captured, and a training step with communication "
              "cannot be. Capture the forward alone, or call the step outside torch.cuda.graph().");
}

void synchronize(c10::Device device) {
  if (!device.is_cpu()) runtime_of(device).synchronizeDevice(device.index());
}

void StreamPoints::note_current_stream() {
  if (device_.is_cpu()) return;
  const c10::Stream stream = current_stream(device_);
  if (std::find(streams_.begin(), streams_.end(), stream) == streams_.end()) {
    streams_.push_back(stream);
  }
}

void StreamPoints::record() {
  while (events_.size() < streams_.size()) events_.emplace_back(device_.type());
  for (size_t i = 0; i < streams_.size(); ++i) events_[i].record(streams_[i]);
}

void StreamPoints::mark_current_stream() {
  clear();
  note_current_stream();
  record();
}

void StreamPoints::block(const c10::Stream& stream) {
  for (size_t i = 0; i < streams_.size(); ++i) events_[i].block(stream);
}

void StreamPoints::block_current_stream() {
  if (!streams_.empty()) block(current_stream(device_));
}

void StreamPoints::synchronize() {
  for (size_t i = 0; i < streams_.size(); ++i) events_[i].synchronize();
}

void wait_for_current_stream(c10::Device device) {
  StreamPoints given(device);
  given.mark_current_stream();
  given.synchronize();
}

void current_stream_waits_for(const c10::Stream& stream) {
  c10::Event event(stream.device_type());
  event.record(stream);
  event.block(current_stream(stream.device()));
}

}  // namespace bagua
