// Kernels with mistakes, one per run: what cuda_emulation.h promises to find. Status 0 means that
// nothing was found, as it should be for `correct`, or that the emulation is as random as it says.
//
//   emulation_faults NAME
#include <algorithm>
#include <cstdint>
#include <cstdio>
#include <cstring>

#include "base/device.h"
#include "base/launch.h"

namespace bagua {

namespace {

constexpr unsigned kAll = 0xffffffff;
constexpr int kThreads = 64;

// Barriers, all operations of a warp, atomics and shared memory, each used as it should be.
__global__ void correct(unsigned* results) {
  __shared__ unsigned of_thread[kThreads];
  const unsigned lane = threadIdx.x % 32;
  of_thread[threadIdx.x] = __shfl_xor_sync(kAll, threadIdx.x, 5);
  __syncthreads();
  const unsigned other = of_thread[kThreads - 1 - threadIdx.x];
  __syncthreads();
  of_thread[threadIdx.x] = other + __shfl_sync(kAll, lane, 7);
  __syncwarp();
  const unsigned neighbour = of_thread[threadIdx.x ^ 1];
  const unsigned even = __ballot_sync(kAll, lane % 2 == 0);
  unsigned half = 0;
  if (lane < 16) half = __all_sync(0xffff, lane < 16);
  atomicAdd(&results[kThreads], 1u);
  results[threadIdx.x] = neighbour + (even == 0x55555555 ? 1000 : 0) + 10000 * half;
}

bool check_correct() {
  unsigned results[kThreads + 1] = {};
  launch("correct", correct, 3, kThreads, nullptr, &results[0]);
  for (unsigned thread = 0; thread < kThreads; ++thread) {
    const unsigned sender = thread ^ 1;
    const unsigned wanted =
        ((kThreads - 1 - sender) ^ 5) + 7 + 1000 + (thread % 32 < 16 ? 10000 : 0);
    if (results[thread] != wanted) {
      std::printf("thread %u has %u instead of %u\n", thread, results[thread], wanted);
      return false;
    }
  }
  return results[kThreads] == 3 * kThreads;
}

constexpr int kBlocks = 64;

// Each CTA reads what nobody has written in its shared memory.
__global__ void uninitialised(unsigned* words) {
  __shared__ unsigned nothing[kThreads];
  if (threadIdx.x == 0) words[blockIdx.x] = nothing[0];
  nothing[threadIdx.x] = words[0];  // or the compiler would know what nobody has written
}

bool check_shared_memory_is_random() {
  unsigned words[kBlocks] = {};
  launch("uninitialised", uninitialised, kBlocks, kThreads, nullptr, &words[0]);
  for (unsigned i = 1; i < kBlocks; ++i) {
    if (words[i] != words[0]) return true;
  }
  return false;
}

// The CTAs' indices in the order in which they run; words[kBlocks] counts them.
__global__ void in_order(unsigned* words) {
  if (threadIdx.x == 0) words[atomicAdd(&words[kBlocks], 1u)] = blockIdx.x;
}

bool check_blocks_run_in_random_order() {
  unsigned words[kBlocks + 1] = {};
  launch("in_order", in_order, kBlocks, kThreads, nullptr, &words[0]);
  return !std::is_sorted(words, words + kBlocks);
}

__global__ void misaligned_load(unsigned* words) {
  const uint4 loaded = *reinterpret_cast<const uint4*>(words + 1);
  words[0] = loaded.x;
}

__global__ void misaligned_store(unsigned* words) {
  store_at_once(reinterpret_cast<uint2*>(words + 1), make_uint2(1, 2));
}

__global__ void divergent_barriers(unsigned*) {
  if (threadIdx.x < 32) {
    __syncthreads();
  } else {
    __syncthreads();
  }
}

__global__ void missing_thread(unsigned*) {
  if (threadIdx.x == 40) return;
  __syncthreads();
}

__global__ void missing_lane(unsigned* words) {
  if (threadIdx.x == 5) return;
  words[threadIdx.x] = __shfl_xor_sync(kAll, threadIdx.x, 1);
}

__global__ void different_masks(unsigned* words) {
  words[threadIdx.x] = __ballot_sync(threadIdx.x % 32 < 16 ? 0x1ffffu : kAll, 1);
}

__global__ void foreign_mask(unsigned* words) { words[threadIdx.x] = __ballot_sync(0xffff, 1); }

__global__ void source_outside_mask(unsigned* words) {
  if (threadIdx.x < 16) words[threadIdx.x] = __shfl_sync(0xffff, threadIdx.x, 20);
}

__global__ void deadlock(unsigned*) {
  if (threadIdx.x < 16) {
    __syncthreads();
  } else {
    __syncwarp();
  }
}

// Only for ThreadSanitizer: the order of execution happens to be right.
__global__ void missing_barrier(unsigned* words) {
  __shared__ unsigned of_thread[kThreads];
  of_thread[threadIdx.x] = threadIdx.x;
  if (threadIdx.x >= 32) words[threadIdx.x] = of_thread[threadIdx.x - 32];
}

// Likewise: the writer is one barrier ahead of the reader.
__global__ void race_between_barriers(unsigned* words) {
  __shared__ unsigned written;
  __syncthreads();
  if (threadIdx.x == 0) written = 7;
  if (threadIdx.x == 40) words[0] = written;
  __syncthreads();
}

// Likewise: a warp's barrier is none for another warp.
__global__ void warp_barrier_for_all(unsigned* words) {
  __shared__ unsigned of_thread[kThreads];
  of_thread[threadIdx.x] = threadIdx.x;
  __syncwarp();
  words[threadIdx.x] = of_thread[kThreads - 1 - threadIdx.x];
}

__global__ void shuffle_as_fence(unsigned* words) {
  __shared__ unsigned of_warp;
  if (threadIdx.x == 0) of_warp = 7;
  __shfl_sync(kAll, threadIdx.x, 0);
  if (threadIdx.x < 32) words[threadIdx.x] = of_warp;
}

struct Check {
  const char* name;
  bool (*passes)();
};

constexpr Check kChecks[] = {
    {"correct", check_correct},
    {"random_shared_memory", check_shared_memory_is_random},
    {"random_order", check_blocks_run_in_random_order},
};

struct Fault {
  const char* name;
  void (*kernel)(unsigned*);
};

constexpr Fault kFaults[] = {
    {"misaligned_load", misaligned_load},
    {"misaligned_store", misaligned_store},
    {"divergent_barriers", divergent_barriers},
    {"missing_thread", missing_thread},
    {"missing_lane", missing_lane},
    {"different_masks", different_masks},
    {"foreign_mask", foreign_mask},
    {"source_outside_mask", source_outside_mask},
    {"deadlock", deadlock},
    {"missing_barrier", missing_barrier},
    {"race_between_barriers", race_between_barriers},
    {"warp_barrier_for_all", warp_barrier_for_all},
    {"shuffle_as_fence", shuffle_as_fence},
};

}  // namespace

}  // namespace bagua

int main(int argc, char** argv) {
  const char* const name = argc > 1 ? argv[1] : "";
  for (const bagua::Check& check : bagua::kChecks) {
    if (std::strcmp(name, check.name) == 0) return check.passes() ? 0 : 1;
  }
  alignas(16) unsigned words[bagua::kThreads] = {};
  for (const bagua::Fault& fault : bagua::kFaults) {
    if (std::strcmp(name, fault.name) != 0) continue;
    bagua::launch(fault.name, fault.kernel, 1, bagua::kThreads, nullptr, &words[0]);
    return 0;
  }
  std::printf("no fault is called '%s'\n", name);
  return 2;
}
