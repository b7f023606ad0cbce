// Starts a kernel, on a GPU or, in tests, emulated on the CPU.
#pragma once

#include <climits>
#include <cstdint>

#include "base/check.h"
#include "base/device.h"

namespace bagua {

// Starts `kernel` on grid x block threads, ordered on `stream` (a cudaStream_t of the current
// device). Nothing is started if grid is 0.
//
// Neither waits nor allocates, so that it may be captured into a CUDA graph. Throws Error, naming
// the kernel, where CUDA refuses; what goes wrong while it runs surfaces at the next
// synchronisation, as always on CUDA.
template <typename... Parameters, typename... Arguments>
void launch(const char* name, void (*kernel)(Parameters...), int64_t grid, int block, void* stream,
            const Arguments&... arguments) {
  if (grid == 0) return;
  BAGUA_CHECK(grid > 0 && grid <= INT_MAX, "kernel ", name, ": ", grid,
              " blocks are more than a grid may have");
#ifdef BAGUA_EMULATE_CUDA
  static_cast<void>(stream);
  emulation::start<Parameters...>(name, kernel, static_cast<unsigned>(grid),
                                  static_cast<unsigned>(block), arguments...);
#else
  cudaLaunchConfig_t config{};
  config.gridDim = dim3(static_cast<unsigned>(grid));
  config.blockDim = dim3(static_cast<unsigned>(block));
  config.stream = static_cast<cudaStream_t>(stream);
  const cudaError_t error = cudaLaunchKernelEx(&config, kernel, arguments...);
  if (error == cudaSuccess) return;
  static_cast<void>(cudaGetLastError());  // or the next caller would see it as his own
  throw Error(concat("kernel ", name, " of ", grid, " x ", block,
                     " threads was not started: ", cudaGetErrorString(error)));
#endif
}

}  // namespace bagua
