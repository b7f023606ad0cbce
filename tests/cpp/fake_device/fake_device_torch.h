// fake_device.h as torch sees it: the device guard, and a fallback that runs every operation on
// host memory under the clocks. Included once per program.
#pragma once

#include <cstring>
#include <string>
#include <string_view>
#include <utility>

#include <ATen/core/Tensor.h>
#include <ATen/core/dispatch/Dispatcher.h>
#include <ATen/native/TensorFactories.h>
#include <ATen/ops/empty.h>
#include <c10/core/impl/DeviceGuardImplInterface.h>
#include <torch/library.h>

#include "fake_device/fake_device.h"

namespace bagua::fake {

inline thread_local int64_t stream_of_thread = 0;
int current_stream() { return static_cast<int>(stream_of_thread); }

struct Guard final : c10::impl::DeviceGuardImplInterface {
  static constexpr c10::DeviceType kType = c10::DeviceType::CUDA;
  static c10::Stream stream(int64_t id) {
    return c10::Stream(c10::Stream::UNSAFE, c10::Device(kType, 0), id);
  }
  c10::DeviceType type() const override { return kType; }
  c10::Device exchangeDevice(c10::Device device) const override { return device; }
  c10::Device getDevice() const override { return c10::Device(kType, 0); }
  void setDevice(c10::Device) const override {}
  void uncheckedSetDevice(c10::Device) const noexcept override {}
  c10::DeviceIndex deviceCount() const noexcept override { return 1; }

  c10::Stream getStream(c10::Device) const override { return stream(stream_of_thread); }
  c10::Stream getDefaultStream(c10::Device) const override { return stream(0); }
  c10::Stream getStreamFromGlobalPool(c10::Device, bool) const override {
    static std::atomic<int64_t> next{1};
    return stream(next++ % kStreams);
  }
  c10::Stream exchangeStream(c10::Stream wanted) const override {
    return stream(std::exchange(stream_of_thread, wanted.id()));
  }
  // Never null: what takes a handle tells it from that of a CPU.
  void* getStreamNativeHandle(const c10::Stream s) const override {
    return reinterpret_cast<void*>(s.id() + 1);
  }

  void record(void** event, const c10::Stream& s, const c10::DeviceIndex,
              const c10::EventFlag) const override {
    if (*event == nullptr) *event = new Clock;
    *static_cast<Clock*>(*event) = Device::instance().recorded(static_cast<int>(s.id()));
  }
  void block(void* event, const c10::Stream& s) const override {
    if (event) Device::instance().wait(static_cast<int>(s.id()), *static_cast<Clock*>(event));
  }
  bool queryEvent(void* event) const override {
    return !event || Device::instance().query(*static_cast<Clock*>(event));
  }
  void synchronizeEvent(void* event) const override {
    if (event) Device::instance().await(*static_cast<Clock*>(event));
  }
  void synchronizeDevice(const c10::DeviceIndex) const override { Device::instance().await_all(); }
  void destroyEvent(void* event, const c10::DeviceIndex) const noexcept override {
    delete static_cast<Clock*>(event);
  }
};

struct Allocation {
  int stream;
  size_t bytes;
  void* memory;
  static void free(void* self) {
    auto* allocation = static_cast<Allocation*>(self);
    Device::instance().release(allocation->stream, allocation->memory, allocation->bytes);
    std::free(allocation->memory);
    delete allocation;
  }
};

inline at::Tensor tensor_over(c10::Storage storage, c10::DispatchKey key, const at::Tensor& like) {
  at::Tensor result = at::detail::make_tensor<c10::TensorImpl>(
      std::move(storage), c10::DispatchKeySet(key), like.dtype());
  result.unsafeGetTensorImpl()->set_sizes_and_strides(like.sizes(), like.strides(),
                                                      like.storage_offset());
  return result;
}

inline at::Tensor allocate(const at::Tensor& like) {
  const size_t bytes = like.storage().nbytes();
  auto* allocation =
      new Allocation{current_stream(), bytes, std::malloc(std::max<size_t>(bytes, 1))};
  c10::DataPtr pointer(allocation->memory, allocation, &Allocation::free, Guard().getDevice());
  c10::Storage storage(c10::Storage::use_byte_size_t(), bytes, std::move(pointer));
  return tensor_over(std::move(storage), c10::DispatchKey::CUDA, like);
}

// One operation: its device tensors stand on host memory meanwhile.
//
// It counts as one launch, unless it is a view or has no elements. Its bytes are those of its
// tensor arguments and results, each once: what an operation keeps to itself (sorting, choosing the
// largest) is not in them, and on a GPU such an operation is several kernels. So is one of a list
// of many or large tensors (_foreach_*).
class Call {
 public:
  explicit Call(const c10::OperatorHandle& op) : name_(op.schema().name()), schema_(op.schema()) {
    for (const c10::Argument& result : schema_.returns()) {
      is_view_ = is_view_ || (result.alias_info() && !result.alias_info()->isWrite());
    }
  }

  void run(const c10::OperatorHandle& op, torch::jit::Stack* stack) {
    if (!is_view_) Device::instance().stand_behind_collectives(current_stream());
    const size_t arguments = schema_.arguments().size();
    for (size_t i = 0; i < arguments; ++i) {
      c10::IValue& value = (*stack)[stack->size() - arguments + i];
      const c10::Argument& argument = schema_.arguments()[i];
      const bool write = argument.alias_info() && argument.alias_info()->isWrite();
      if (argument.name() == "non_blocking") host_waits_ = host_waits_ && !value.toBool();
      each_tensor(value, [&](const at::Tensor& tensor) { return to_host(tensor, write); });
      if (value.isDevice()) value = c10::Device(c10::kCPU);
    }
    op.callBoxed(stack);
    if (name_ == "aten::copy_" && host_memory_) {
      Device::instance().copies_host_memory(current_stream());
    }
    if (name_ == "aten::_local_scalar_dense" || (host_written_ && host_waits_)) {
      Device::instance().await(Device::instance().recorded(current_stream()));
    }
    for (const auto& [host, device] : pairs_) {
      if (host.storage().nbytes() <= device.storage().nbytes()) continue;
      device.unsafeGetTensorImpl()->shallow_copy_from(copied(host).getIntrusivePtr());
    }
    const size_t returns = schema_.returns().size();
    for (size_t i = 0; i < returns; ++i) {
      each_tensor((*stack)[stack->size() - returns + i],
                  [&](const at::Tensor& tensor) { return to_device(tensor); });
    }
    count(work_);
  }

 private:
  template <typename Function>
  static void each_tensor(c10::IValue& value, Function function) {
    if (value.isTensor() && value.toTensor().defined()) {
      value = function(value.toTensor());
    } else if (value.isTensorList()) {
      std::vector<at::Tensor> tensors;
      for (const at::Tensor& tensor : value.toTensorVector()) tensors.push_back(function(tensor));
      value = tensors;
    } else if (value.isOptionalTensorList()) {
      c10::List<std::optional<at::Tensor>> tensors;
      for (const std::optional<at::Tensor>& tensor : value.toOptionalTensorList()) {
        tensors.push_back(tensor ? std::optional(function(*tensor)) : std::nullopt);
      }
      value = tensors;
    }
  }

  // An operation in place reads what it writes, unless it replaces it.
  bool is_in_place() const {
    const std::string_view name = name_;
    return name.ends_with('_') && !name.ends_with("copy_") && name != "aten::zero_" &&
           name != "aten::fill_";
  }

  void note_access(const at::Tensor& tensor, const void* begin, size_t bytes, bool write) {
    if (tensor.numel() == 0 || is_view_ || name_ == "aten::resize_") return;
    const auto own = static_cast<int64_t>(tensor.nbytes());
    work_.launches = 1;
    work_.bytes_read += !write || is_in_place() ? own : 0;
    work_.bytes_written += write ? own : 0;
    Device::instance().access(current_stream(), name_, begin, bytes, write);
  }

  at::Tensor to_host(const at::Tensor& tensor, bool write) {
    if (tensor.is_cpu()) {
      host_memory_ = true;
      host_written_ = host_written_ || write;
      return tensor;
    }
    if (write && tensor.storage().nbytes() == 0) {  // an output that the operation will resize
      pairs_.emplace_back(at::empty({0}, at::TensorOptions(tensor.scalar_type())), tensor);
      return pairs_.back().first;
    }
    int64_t last = 0;
    for (int64_t d = 0; d < tensor.dim(); ++d) last += (tensor.size(d) - 1) * tensor.stride(d);
    note_access(tensor, tensor.const_data_ptr(), (last + 1) * tensor.element_size(), write);
    c10::DataPtr pointer(tensor.storage().mutable_data(), c10::Device(c10::kCPU));
    c10::Storage storage(c10::Storage::use_byte_size_t(), tensor.storage().nbytes(),
                         std::move(pointer));
    pairs_.emplace_back(tensor_over(std::move(storage), c10::DispatchKey::CPU, tensor), tensor);
    return pairs_.back().first;
  }

  // An argument itself, a view of one, or new memory.
  at::Tensor to_device(const at::Tensor& result) {
    for (const auto& [host, device] : pairs_) {
      if (result.is_same(host)) return device;
    }
    for (const auto& [host, device] : pairs_) {
      if (result.storage().data() != host.storage().data() || result.numel() == 0) continue;
      return tensor_over(device.storage(), c10::DispatchKey::CUDA, result);
    }
    return copied(result);
  }

  at::Tensor copied(const at::Tensor& result) {
    at::Tensor copy = allocate(result);
    std::memcpy(copy.storage().mutable_data(), result.storage().data(), result.storage().nbytes());
    note_access(result, copy.storage().data(), copy.storage().nbytes(), true);
    return copy;
  }

  const std::string name_;
  const c10::FunctionSchema& schema_;
  std::vector<std::pair<at::Tensor, at::Tensor>> pairs_;  // on the host, on the device
  Work work_;
  bool is_view_ = false;  // touches no element
  bool host_memory_ = false;
  bool host_written_ = false;
  bool host_waits_ = true;
};

inline void run_on_host(const c10::OperatorHandle& op, torch::jit::Stack* stack) {
  Call(op).run(op, stack);
}

inline at::Tensor empty(c10::IntArrayRef size, std::optional<at::ScalarType> dtype,
                        std::optional<at::Layout>, std::optional<at::Device>, std::optional<bool>,
                        std::optional<at::MemoryFormat> format) {
  return allocate(at::empty(size, at::TensorOptions().dtype(dtype), format));
}

inline at::Tensor empty_strided(c10::IntArrayRef size, c10::IntArrayRef stride,
                                std::optional<at::ScalarType> dtype, std::optional<at::Layout>,
                                std::optional<at::Device>, std::optional<bool>) {
  return allocate(at::empty_strided(size, stride, at::TensorOptions().dtype(dtype)));
}

C10_REGISTER_GUARD_IMPL(CUDA, Guard)
TORCH_LIBRARY_IMPL(_, CUDA, library) {
  library.fallback(torch::CppFunction::makeFromBoxedFunction<&run_on_host>());
}
TORCH_LIBRARY_IMPL(aten, CUDA, library) {
  library.impl("empty.memory_format", &empty);
  library.impl("empty_strided", &empty_strided);
  // These would not reach the fallback: torch has one implementation for all devices.
  for (const char* name :
       {"copy_", "_foreach_copy_", "_foreach_lerp.ScalarList", "_foreach_mul.Scalar"}) {
    library.impl(name, torch::CppFunction::makeFromBoxedFunction<&run_on_host>());
  }
}

}  // namespace bagua::fake
