// BAGUA_HD marks a function that the CPU loops and the CUDA kernels share.
//
// On the CPU it also forces inlining: a loop is compiled once per instruction set
// (codec/chunk_codec_cpu.cpp), and only what is inlined into it is compiled along.
#pragma once

#ifdef __CUDACC__
#define BAGUA_HD __host__ __device__ __forceinline__
#else
#define BAGUA_HD inline __attribute__((always_inline))
#endif
