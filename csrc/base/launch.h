// Starts a kernel, on a GPU or, in tests, emulated on the CPU.
#pragma once

#include <climits>
#include <cstdint>

#include "base/check.h"
#include "base/device.h"

namespace bagua {

// Note [Kernels are loaded where they are made]
// By default CUDA loads a kernel when it is first used, and that may wait for all that the GPU is
// doing: for a kernel of NCCL, too, that spins for a peer, whose thread waits for a load of its
// own. So each factory of something with kernels calls what launches them once, with arguments that
// are never looked at, while a LoadsKernels lives: launch() then loads and starts nothing. No
// kernel is first seen in a round.
class LoadsKernels final {
 public:
  LoadsKernels() { here() = true; }
  ~LoadsKernels() { here() = false; }
  LoadsKernels(const LoadsKernels&) = delete;
  LoadsKernels& operator=(const LoadsKernels&) = delete;

  // Whether launch() loads, on this thread.
  static bool& here() {
#ifdef BAGUA_EMULATE_CUDA
    static bool loads = false;  // memory of threads is the emulation's shared memory
#else
    thread_local bool loads = false;
#endif
    return loads;
  }
};

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
  if (LoadsKernels::here()) return emulation::load(reinterpret_cast<const void*>(kernel));
  emulation::start<Parameters...>(name, kernel, static_cast<unsigned>(grid),
                                  static_cast<unsigned>(block), arguments...);
#else
  if (LoadsKernels::here()) {
    cudaFuncAttributes attributes;
    // Without a driver nothing can be loaded: a launch will say so.
    if (cudaFuncGetAttributes(&attributes, kernel) != cudaSuccess) {
      static_cast<void>(cudaGetLastError());
    }
    return;
  }
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
