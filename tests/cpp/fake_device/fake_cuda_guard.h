// A device that says "cuda" over host memory, in a torch without CUDA: streams are numbers, and
// events come true when the stream's kernels have ended, which the fake NCCL knows if it is
// followed, and a test lets them. Included once per program: a guard, once registered, stays.
//
// Threads begin on device 0, as on CUDA, and the ranks' device is another one. What would make a
// context on a device is noted: setting it, and each call of torch that sets it for a while, since
// that sets the thread's own device again afterwards.
#pragma once

#include <atomic>
#include <cstdint>
#include <utility>

#include <ATen/core/TensorBase.h>
#include <c10/core/StorageImpl.h>
#include <c10/core/TensorImpl.h>
#include <c10/core/impl/DeviceGuardImplInterface.h>

namespace {

const c10::Device kDevice(c10::DeviceType::CUDA, 1);

std::atomic<bool> holds{false};    // events behind kernels do not come true
std::atomic<bool> breaks{false};   // asking for one is an error
std::atomic<bool> refuses{false};  // setting a device is an error, as after an illegal access
std::atomic<int> events{0};        // that exist
std::atomic<int> events_made{0};
std::atomic<unsigned> contexts{0};  // a bit for each device that has one

// Functions of the fake NCCL: how many kernels a stream has been given, whether so many have ended.
struct Followed {
  uint64_t (*given)(void* stream) = nullptr;
  int (*have_ended)(void* stream, uint64_t kernels) = nullptr;
};
Followed followed;

struct Event {
  void* stream;
  uint64_t kernels;
};

thread_local c10::StreamId current_stream = 1;
thread_local c10::DeviceIndex current_device = 0;

void make_context(c10::DeviceIndex device) { contexts |= 1u << device; }

class FakeGuard final : public c10::impl::DeviceGuardImplInterface {
 public:
  c10::DeviceType type() const override { return kDevice.type(); }
  c10::Device exchangeDevice(c10::Device device) const override {
    TORCH_CHECK(!refuses || device.index() == current_device,
                "an illegal memory access was encountered");
    make_context(device.index());
    return c10::Device(type(), std::exchange(current_device, device.index()));
  }
  c10::Device getDevice() const override { return c10::Device(type(), current_device); }
  void setDevice(c10::Device device) const override { exchangeDevice(device); }
  void uncheckedSetDevice(c10::Device device) const noexcept override {
    current_device = device.index();  // torch puts it off until the device is used
  }
  c10::DeviceIndex deviceCount() const noexcept override { return 2; }

  c10::Stream getStream(c10::Device) const override {
    return c10::Stream(c10::Stream::UNSAFE, kDevice, current_stream);
  }
  c10::Stream exchangeStream(c10::Stream stream) const override {
    return c10::Stream(c10::Stream::UNSAFE, kDevice, std::exchange(current_stream, stream.id()));
  }
  void* getStreamNativeHandle(const c10::Stream stream) const override {
    return reinterpret_cast<void*>(stream.id());
  }

  void record(void** event, const c10::Stream& stream, const c10::DeviceIndex,
              const c10::EventFlag) const override {
    set_for_a_while(kDevice.index());
    if (!*event) {
      ++events;
      ++events_made;
      *event = new Event;
    }
    void* const handle = getStreamNativeHandle(stream);
    *static_cast<Event*>(*event) = {handle, followed.given ? followed.given(handle) : 0};
  }
  void block(void*, const c10::Stream&) const override {}
  bool queryEvent(void* event) const override {
    TORCH_CHECK(!breaks, "an illegal memory access was encountered");
    const auto [stream, kernels] = *static_cast<Event*>(event);
    if (holds && (!followed.given || kernels > 0)) return false;
    return !followed.have_ended || followed.have_ended(stream, kernels);
  }
  void destroyEvent(void* event, const c10::DeviceIndex device) const noexcept override {
    if (!event) return;
    set_for_a_while(device);
    delete static_cast<Event*>(event);
    --events;
  }

 private:
  static void set_for_a_while(c10::DeviceIndex device) {
    make_context(device);
    make_context(current_device);
  }
};

C10_REGISTER_GUARD_IMPL(CUDA, FakeGuard)

// A float32 tensor on "cuda:1" over `numel` floats of the caller's.
at::TensorBase tensor_over(float* data, int64_t numel) {
  c10::Storage storage(c10::Storage::use_byte_size_t(), numel * sizeof(float),
                       c10::DataPtr(data, kDevice));
  auto tensor = at::detail::make_tensor_base<c10::TensorImpl>(
      std::move(storage), c10::DispatchKeySet(c10::DispatchKey::CUDA),
      caffe2::TypeMeta::Make<float>());
  tensor.unsafeGetTensorImpl()->set_sizes_contiguous(numel);
  return tensor;
}

}  // namespace
