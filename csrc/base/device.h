// Language of the kernels: CUDA, or in tests its emulation on the CPU.
//
// Files that include this header are compiled by nvcc, or by g++ with -DBAGUA_EMULATE_CUDA and
// tests/cpp on the include path. So that both can run them, kernels use neither cub nor cooperative
// groups, and only shared memory of fixed size.
#pragma once

#ifdef BAGUA_EMULATE_CUDA

#include "emulation/cuda_emulation.h"
#define BAGUA_UNROLL

#else

#include <cuda_runtime.h>
#define BAGUA_UNROLL _Pragma("unroll")

namespace bagua {

// One store to global memory, at a multiple of its size. Of an assignment the compiler is free to
// make several stores, and does.
__device__ __forceinline__ void store_at_once(uint4* address, uint4 value) {
  asm volatile("st.global.v4.b32 [%0], {%1, %2, %3, %4};" ::"l"(__cvta_generic_to_global(address)),
               "r"(value.x), "r"(value.y), "r"(value.z), "r"(value.w)
               : "memory");
}
__device__ __forceinline__ void store_at_once(uint2* address, uint2 value) {
  asm volatile("st.global.v2.b32 [%0], {%1, %2};" ::"l"(__cvta_generic_to_global(address)),
               "r"(value.x), "r"(value.y)
               : "memory");
}
__device__ __forceinline__ void store_at_once(uint1* address, uint1 value) { *address = value; }

}  // namespace bagua

#endif

// A function of kernels only.
#define BAGUA_DEVICE __device__ __forceinline__
