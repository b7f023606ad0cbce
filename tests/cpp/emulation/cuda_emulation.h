// As much of CUDA as our kernels use, on the CPU, for tests: csrc/base/launch.h includes this
// header where BAGUA_EMULATE_CUDA is defined, and g++ compiles the kernels' sources unchanged.
//
// Every CUDA thread is a fiber on the caller's thread; the CTAs of a grid run one after the other,
// in a random order, and each finds random words in its shared memory. A fiber runs until it meets
// a barrier or an operation of its warp. What a GPU would leave undefined ends the program with a
// message and exit status 3:
// - an access of 4, 8 or 16 bytes at once to an address that is not a multiple of that;
// - __syncthreads that some threads meet elsewhere, or never;
// - operations of a warp that a lane of the mask does not reach, or with another mask, or by a lane
//   that is not in it; a shuffle from a lane outside the mask.
// Under ThreadSanitizer the fibers are threads to it, ordered by nothing but __syncthreads,
// __syncwarp and the ends of a CTA: a missing barrier is reported as the data race that it is, also
// where the emulated order of execution hides it, or a shuffle seems to order memory.
// Not emulated: CTAs at the same time, warps in lockstep, dynamic shared memory. x86-64 only.
#pragma once

#include <cstddef>
#include <cstdint>
#include <functional>
#include <source_location>

#define __global__
#define __device__
#define __host__
#define __grid_constant__
#define __launch_bounds__(...)
#define __forceinline__ inline __attribute__((always_inline))
// One CTA at a time: its shared memory is there once. As the program's thread-local memory it is
// one piece, which is filled with random words before each CTA; AddressSanitizer watches the ends
// of plain static variables only.
#ifdef __SANITIZE_ADDRESS__
#define __shared__ static
#else
#define __shared__ static thread_local
#endif

struct dim3 {
  unsigned x = 1;
  unsigned y = 1;
  unsigned z = 1;
};

// Of the fiber that runs.
extern dim3 threadIdx;
extern dim3 blockIdx;
extern dim3 blockDim;
extern dim3 gridDim;

namespace bagua::emulation {

// A test of the tests: every thread passes its nth __syncthreads as if it were not there; 0: none.
inline int skipped_barrier = 0;

// Runs `thread` as every thread of grid CTAs of `block` threads; `name` is the kernel's.
void run(const char* name, unsigned grid, unsigned block, const std::function<void()>& thread);

// Notes that a program has asked for the kernel before its first launch. With must_be_loaded a
// launch of another one ends the program: on a GPU it might wait for kernels that spin.
inline bool must_be_loaded = false;
void load(const void* kernel);
void refuse_unless_loaded(const char* name, const void* kernel);

// A kernel in place of that of the sources, which is given its parameters as a GPU is. Null: there
// is none. ../ptx has some; programs that are linked without it have none.
using Translated = void (*)(const std::byte* parameters);
Translated translation_of(const char* name, const void* kernel, size_t parameter_bytes);

// Runs the kernel, or its translation.
template <typename... Parameters, typename... Arguments>
void start(const char* name, void (*kernel)(Parameters...), unsigned grid, unsigned block,
           const Arguments&... arguments) {
  refuse_unless_loaded(name, reinterpret_cast<const void*>(kernel));
  alignas(16) std::byte packed[(0 + ... + (sizeof(Parameters) + alignof(Parameters)))];
  size_t used = 0;
  const auto pack = [&]<typename Parameter>(const Parameter& parameter) {
    used = (used + alignof(Parameter) - 1) / alignof(Parameter) * alignof(Parameter);
    __builtin_memcpy(packed + used, &parameter, sizeof(Parameter));
    used += sizeof(Parameter);
  };
  (pack.template operator()<Parameters>(arguments), ...);
  const Translated translated = translation_of(name, reinterpret_cast<void*>(kernel), used);
  if (translated != nullptr) return run(name, grid, block, [&] { translated(packed); });
  run(name, grid, block, [&] { kernel(arguments...); });
}

using Location = std::source_location;

void sync_threads(const Location& location);

enum class WarpOperation { kSync, kShuffle, kAll, kBallot };

// What the lane receives of the values of all lanes of the mask; `lane`: whose value, of a shuffle.
uint64_t warp_operation(WarpOperation operation, unsigned mask, uint64_t value, unsigned lane,
                        const Location& location);

void check_alignment(const void* address, size_t bytes);

template <typename T>
T shuffle(unsigned mask, T value, unsigned lane, const Location& location) {
  static_assert(sizeof(T) <= sizeof(uint64_t));
  uint64_t bits = 0;
  __builtin_memcpy(&bits, &value, sizeof(T));
  bits = warp_operation(WarpOperation::kShuffle, mask, bits, lane, location);
  __builtin_memcpy(&value, &bits, sizeof(T));
  return value;
}

inline unsigned lane() { return threadIdx.x % 32; }

// kCount 32-bit words that are read and written at once.
template <int kCount>
struct alignas(4 * kCount) CheckedWords;

template <>
struct alignas(4) CheckedWords<1> {
  unsigned x;
};
template <>
struct alignas(8) CheckedWords<2> {
  unsigned x, y;
};
template <>
struct alignas(16) CheckedWords<4> {
  unsigned x, y, z, w;
};

template <int kCount>
struct alignas(4 * kCount) CheckedVector : CheckedWords<kCount> {
  using Base = CheckedWords<kCount>;
  explicit CheckedVector(Base words) : Base(words) {}
  CheckedVector(const CheckedVector& other) : Base(other.checked()) {}
  CheckedVector& operator=(const CheckedVector& other) {
    checked();
    static_cast<Base&>(*this) = other.checked();
    return *this;
  }

 private:
  const Base& checked() const {
    check_alignment(this, 4 * kCount);
    return *this;
  }
};

}  // namespace bagua::emulation

using uint1 = bagua::emulation::CheckedVector<1>;
using uint2 = bagua::emulation::CheckedVector<2>;
using uint4 = bagua::emulation::CheckedVector<4>;

inline uint1 make_uint1(unsigned x) { return uint1({x}); }
inline uint2 make_uint2(unsigned x, unsigned y) { return uint2({x, y}); }
inline uint4 make_uint4(unsigned x, unsigned y, unsigned z, unsigned w) {
  return uint4({x, y, z, w});
}

inline void __syncthreads(
    const bagua::emulation::Location& location = bagua::emulation::Location::current()) {
  bagua::emulation::sync_threads(location);
}

inline void __syncwarp(unsigned mask = 0xffffffff, const bagua::emulation::Location& location =
                                                       bagua::emulation::Location::current()) {
  warp_operation(bagua::emulation::WarpOperation::kSync, mask, 0, 0, location);
}

template <typename T>
T __shfl_sync(unsigned mask, T value, int lane,
              const bagua::emulation::Location& location = bagua::emulation::Location::current()) {
  return bagua::emulation::shuffle(mask, value, static_cast<unsigned>(lane) % 32, location);
}

template <typename T>
T __shfl_xor_sync(
    unsigned mask, T value, int bits,
    const bagua::emulation::Location& location = bagua::emulation::Location::current()) {
  return bagua::emulation::shuffle(
      mask, value, bagua::emulation::lane() ^ static_cast<unsigned>(bits), location);
}

inline int __all_sync(
    unsigned mask, int predicate,
    const bagua::emulation::Location& location = bagua::emulation::Location::current()) {
  return static_cast<int>(
      warp_operation(bagua::emulation::WarpOperation::kAll, mask, predicate != 0, 0, location));
}

inline unsigned __ballot_sync(
    unsigned mask, int predicate,
    const bagua::emulation::Location& location = bagua::emulation::Location::current()) {
  return static_cast<unsigned>(
      warp_operation(bagua::emulation::WarpOperation::kBallot, mask, predicate != 0, 0, location));
}

inline int __popc(unsigned word) { return __builtin_popcount(word); }

// All fibers share one thread: any read-modify-write is atomic. The builtins tell ThreadSanitizer.
template <typename T>
T atomicAdd(T* address, T value) {
  return __atomic_fetch_add(address, value, __ATOMIC_RELAXED);
}

namespace bagua {

// csrc/base/device.h
template <typename Words>
void store_at_once(Words* address, Words value) {
  *address = value;
}

}  // namespace bagua
