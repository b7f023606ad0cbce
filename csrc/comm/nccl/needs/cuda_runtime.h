// All that nccl.h needs of CUDA: the name of a stream, an opaque pointer of the driver's.
//
// nccl.h asks for <cuda_runtime.h> and <cuda_fp16.h>. Only the files that include nccl.h see this
// folder, so that the communicator compiles, and its tests run, without a CUDA toolkit.
#pragma once

struct CUstream_st;
using cudaStream_t = CUstream_st*;
