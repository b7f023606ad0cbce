# Sets BAGUA_WITH_CUDA and, with CUDA, makes the object library bagua_kernels.
#
# The kernels need nvcc and the toolkit's headers, no torch library and no driver; CUDA's runtime is
# linked statically, so that the extension can be imported where there is neither.

include(CheckLanguage)

set(BAGUA_WITH_CUDA OFF)
if(BAGUA_CUDA STREQUAL "AUTO")
  if(NOT TORCH_CUDA STREQUAL "none")
    check_language(CUDA)
    if(CMAKE_CUDA_COMPILER)
      set(BAGUA_WITH_CUDA ON)
    else()
      message(WARNING
        "torch has CUDA ${TORCH_CUDA}, but no nvcc was found: building for CPU only. Install the CUDA "
        "toolkit, or set CUDACXX to its nvcc, and install again.")
    endif()
  endif()
elseif(BAGUA_CUDA)
  check_language(CUDA)
  if(NOT CMAKE_CUDA_COMPILER)
    message(FATAL_ERROR
      "BAGUA_CUDA=ON needs nvcc. Install the CUDA toolkit (12 or 13), or set CUDACXX to its nvcc.")
  endif()
  set(BAGUA_WITH_CUDA ON)
endif()
if(BAGUA_SANITIZE)
  set(BAGUA_WITH_CUDA OFF)  # the sanitized programs run on CPU
endif()
message(STATUS "CUDA kernels: ${BAGUA_WITH_CUDA} (BAGUA_CUDA=${BAGUA_CUDA})")

if(BAGUA_WITH_CUDA)
  if(NOT DEFINED CMAKE_CUDA_ARCHITECTURES AND NOT DEFINED ENV{CUDAARCHS})
    # Machine code for A100, H100/H200 and B200; newer ones compile the PTX of the last. Chosen
    # before CMake compiles its test program: a toolkit before 12.8 does not know B200.
    execute_process(COMMAND "${CMAKE_CUDA_COMPILER}" --version OUTPUT_VARIABLE NVCC_SAID)
    string(REGEX MATCH "release ([0-9.]+)" NVCC_SAID "${NVCC_SAID}")
    if(NVCC_SAID AND CMAKE_MATCH_1 VERSION_LESS 12.8)
      set(CMAKE_CUDA_ARCHITECTURES 80-real 90)
    else()
      set(CMAKE_CUDA_ARCHITECTURES 80-real 90-real 100)
    endif()
  endif()
  enable_language(CUDA)
  find_package(CUDAToolkit REQUIRED)
  # A runtime of a newer major version than the driver's fails at the first launch, and a driver is
  # at least of torch's.
  string(REGEX MATCH "^[0-9]+" TORCH_CUDA_MAJOR "${TORCH_CUDA}")
  if(TORCH_CUDA_MAJOR AND CUDAToolkit_VERSION_MAJOR GREATER TORCH_CUDA_MAJOR)
    message(FATAL_ERROR
      "nvcc is of CUDA ${CUDAToolkit_VERSION}, torch of CUDA ${TORCH_CUDA}: kernels of a newer major "
      "version may not start on the driver that torch runs on. Set CUDACXX to the nvcc of a toolkit "
      "${TORCH_CUDA_MAJOR}.x, install a torch for CUDA ${CUDAToolkit_VERSION_MAJOR}, or build for CPU "
      "with BAGUA_CUDA=OFF.")
  endif()
  # CMake 3.25 knows no C++20 for nvcc.
  if(NOT CMAKE_CUDA20_STANDARD_COMPILE_OPTION)
    set(CMAKE_CUDA20_STANDARD_COMPILE_OPTION "-std=c++20")
    set(CMAKE_CUDA20_EXTENSION_COMPILE_OPTION "-std=c++20")
  endif()
  set(CMAKE_CUDA_STANDARD 20)
  set(CMAKE_CUDA_STANDARD_REQUIRED ON)
  set(CMAKE_CUDA_FLAGS_RELEASE "-O3")
  if(CCACHE AND NOT CMAKE_CUDA_COMPILER_LAUNCHER)
    set(CMAKE_CUDA_COMPILER_LAUNCHER "${CCACHE}")
  endif()

  # -fmad=false: the bytes must be those of the CPU codecs.
  add_library(bagua_kernels OBJECT
    csrc/codec/cuda/chunk_codec_cuda.cu
    csrc/codec/cuda/frame_kernels_cuda.cu
    csrc/codec/cuda/fused_codec_cuda.cu
    csrc/codec/cuda/fused_slice_codec_cuda.cu
    csrc/codec/cuda/sparse_codec_cuda.cu
    csrc/comm/nccl/fill_if_set.cu
    csrc/math/cuda/low_rank_kernels_cuda.cu)
  target_include_directories(bagua_kernels PUBLIC csrc)
  target_compile_options(bagua_kernels PRIVATE -fmad=false -Xptxas=-v)
  if(BAGUA_STRICT)  # a spilled register is an error
    target_compile_options(bagua_kernels PRIVATE
      -Xptxas=-warn-spills -Werror=all-warnings -Xcompiler=-Wall,-Wextra)
  endif()
endif()
