// Calls of CUDA's runtime and of torch's pinned memory that no emulated kernel makes.
#include <set>
#include <string>
#include <vector>

#include <ATen/detail/CUDAHooksInterface.h>
#include <ATen/ops/from_blob.h>

#include "comm/device_stream.cpp"  // NOLINT: where the current stream is asked for
#include "comm/host_memory.h"
#include "comm/nccl/fill_if_set.cu"  // NOLINT: compiled against the fake cuda_runtime.h
#include "fake_device/fake_cuda_guard.h"

namespace {

// A torch with CUDA, as far as host_memory.h asks. ATen looks for this name.
struct CUDAHooks final : at::CUDAHooksInterface {
  explicit CUDAHooks(at::CUDAHooksArgs) {}
  bool hasCUDA() const override { return true; }
};

struct Recorded {
  void *memory, *context;
  c10::StreamId stream;
};
std::vector<Recorded> recorded;

struct PinnedMemory final : at::HostAllocator {
  at::DataPtr allocate(size_t bytes) override {
    void* const memory = std::aligned_alloc(64, (bytes + 63) / 64 * 64);
    return {memory, memory, std::free, at::kCPU};
  }
  void copy_data(void*, const void*, size_t) const override {}
  bool record_event(void* memory, void* context, c10::Stream stream) override {
    recorded.push_back({memory, context, stream.id()});
    return true;
  }
  void empty_cache() override {}
  at::HostStats get_stats() override { return {}; }
  void reset_accumulated_stats() override {}
  void reset_peak_stats() override {}
};

std::string flags_differ() {
  constexpr size_t kFlags = 3000;  // of several pages
  std::set<uint32_t*> flags;
  for (size_t i = 0; i < kFlags; ++i) {
    uint32_t* const flag = bagua::make_device_flag();
    if (*flag != 0) return "a new flag is set";
    flags.insert(flag);
    *flag = 1;
  }
  if (flags.size() != kFlags) return "communicators share a flag";
  for (const unsigned how : flags_of_host_memory) {
    if (how != (cudaHostAllocPortable | cudaHostAllocMapped)) return "kernels cannot read a flag";
  }
  if (!launched.empty()) return "making a flag started a kernel";
  const auto* const kernel = reinterpret_cast<const void*>(bagua::fill_bytes_if_set);
  return loaded.size() == kFlags && loaded.front() == kernel
             ? ""
             : "the kernel was not loaded where the flag was made";
}

std::string kernels_run_on_the_given_stream() {
  const auto stream = reinterpret_cast<cudaStream_t>(0x70);
  uint32_t flag = 0;
  std::vector<std::byte> data(100);
  bagua::fill_if_set(&flag, data.data(), 100, stream);
  if (data[99] != std::byte{0}) return "memory was filled although no flag was set";
  flag = 1;
  bagua::fill_if_set(&flag, data.data(), 100, stream);
  if (data[0] != std::byte{0xff}) return "memory was not filled although the flag was set";
  if (launched.size() != 2) return "there are not two launches";
  for (const cudaLaunchConfig_t& launch : launched) {
    if (launch.stream != stream) return "a kernel runs on another stream";
    if (launch.gridDim.x != 1 || launch.blockDim.x != 512) return "a kernel has another grid";
  }
  return "";
}

std::string memory_waits_for_the_current_stream() {
  const c10::Device cuda(c10::DeviceType::CUDA, 1);
  static PinnedMemory pinned;
  at::setHostAllocator(cuda.type(), &pinned);
  const at::Tensor memory = at::from_blob(std::malloc(4), {1}, std::free, at::kFloat);
  current_stream = 12;
  bagua::used_by_current_stream(memory, c10::Device(c10::DeviceType::CPU));
  if (!recorded.empty()) return "memory of the CPU waits for a device";
  bagua::used_by_current_stream(memory, cuda);
  if (recorded.size() != 1) return "memory is given away before the stream has read it";
  const Recorded& first = recorded.front();
  if (first.memory != memory.data_ptr() || first.stream != 12) return "another stream is awaited";
  return first.context == memory.storage().data_ptr().get_context() ? "" : "another block waits";
}

}  // namespace

namespace at {
REGISTER_CUDA_HOOKS(CUDAHooks)
}

extern "C" const char* runtime_calls() {
  static std::string wrong;
  for (const auto check :
       {flags_differ, kernels_run_on_the_given_stream, memory_waits_for_the_current_stream}) {
    wrong = check();
    if (!wrong.empty()) break;
  }
  return wrong.c_str();
}
