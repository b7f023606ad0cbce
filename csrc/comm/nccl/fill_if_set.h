// A flag that the host sets and kernels read.
#pragma once

#include <cstddef>
#include <cstdint>

namespace bagua {

// A zero word in host memory that every GPU of the process can read; null if this build has no CUDA
// kernels. It is never freed: a kernel may read it after its owner. Throws Error where CUDA
// refuses. Makes a context on the current device.
uint32_t* make_device_flag();

// Puts a kernel on `stream` (a cudaStream_t of the current device) that sets all bits of `data` if
// *flag is not 0 by then.
void fill_if_set(const uint32_t* flag, std::byte* data, int64_t bytes, void* stream);

}  // namespace bagua
