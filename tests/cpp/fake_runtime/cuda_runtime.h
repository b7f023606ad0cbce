// The part of CUDA's runtime that base/launch.h and fill_if_set.cu use, for g++: what they ask for
// is noted. So the branches that only nvcc compiles otherwise run on a CPU.
#pragma once

#include <cstddef>
#include <cstdint>
#include <cstdlib>
#include <vector>

#define __global__
#define __device__
#define __host__
#define __forceinline__ inline
#define __shared__ static
#define __launch_bounds__(threads)

using cudaError_t = int;
using cudaStream_t = struct CUstream_st*;
constexpr cudaError_t cudaSuccess = 0;
constexpr unsigned cudaHostAllocPortable = 1, cudaHostAllocMapped = 2;

struct uint1 {
  unsigned x;
};
struct uint2 {
  unsigned x, y;
};
struct uint4 {
  unsigned x, y, z, w;
};
struct dim3 {
  dim3(unsigned x = 1, unsigned y = 1, unsigned z = 1) : x(x), y(y), z(z) {}
  unsigned x, y, z;
};

inline dim3 threadIdx(0), blockIdx(0), blockDim, gridDim;
inline void __syncthreads() {}
size_t __cvta_generic_to_global(const void*);

struct cudaLaunchConfig_t {
  dim3 gridDim, blockDim;
  size_t dynamicSmemBytes = 0;
  cudaStream_t stream = nullptr;
};
struct cudaFuncAttributes {};

// Notes of the calls.
inline std::vector<cudaLaunchConfig_t> launched;
inline std::vector<const void*> loaded;
inline std::vector<unsigned> flags_of_host_memory;

// One thread runs the kernel.
template <typename... Parameters, typename... Arguments>
cudaError_t cudaLaunchKernelEx(const cudaLaunchConfig_t* config, void (*kernel)(Parameters...),
                               Arguments&&... arguments) {
  launched.push_back(*config);
  kernel(arguments...);
  return cudaSuccess;
}

template <typename Kernel>
cudaError_t cudaFuncGetAttributes(cudaFuncAttributes*, Kernel* kernel) {
  loaded.push_back(reinterpret_cast<const void*>(kernel));
  return cudaSuccess;
}

inline cudaError_t cudaHostAlloc(void** memory, size_t bytes, unsigned flags) {
  flags_of_host_memory.push_back(flags);
  *memory = std::aligned_alloc(4096, bytes);
  return cudaSuccess;
}

inline cudaError_t cudaGetLastError() { return cudaSuccess; }
inline const char* cudaGetErrorString(cudaError_t) { return "an error"; }
