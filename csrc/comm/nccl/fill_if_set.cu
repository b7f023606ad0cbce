#include <cstring>
#include <mutex>

#include "base/check.h"
#include "base/launch.h"
#include "comm/nccl/fill_if_set.cuh"
#include "comm/nccl/fill_if_set.h"

namespace bagua {

uint32_t* make_device_flag() {
  constexpr size_t kPageBytes = 4096;
  static std::mutex mutex;
  static std::byte* page = nullptr;
  static size_t used = kPageBytes;
  const std::lock_guard lock(mutex);
  {
    const LoadsKernels here;
    fill_if_set(nullptr, nullptr, 1, nullptr);
  }
  if (used == kPageBytes) {
    void* memory = nullptr;
    const cudaError_t error =
        cudaHostAlloc(&memory, kPageBytes, cudaHostAllocPortable | cudaHostAllocMapped);
    if (error != cudaSuccess) {
      static_cast<void>(cudaGetLastError());  // or the next caller would see it as his own
      throw Error(
          concat("memory for the flags of NCCL communicators: ", cudaGetErrorString(error)));
    }
    std::memset(memory, 0, kPageBytes);
    page = static_cast<std::byte*>(memory);
    used = 0;
  }
  auto* const flag = reinterpret_cast<uint32_t*>(page + used);
  used += sizeof(*flag);
  return flag;
}

void fill_if_set(const uint32_t* flag, std::byte* data, int64_t bytes, void* stream) {
  launch("fill_bytes_if_set", fill_bytes_if_set, fill_grid(bytes), kFillThreads, stream, flag, data,
         bytes);
}

}  // namespace bagua
