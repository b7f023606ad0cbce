// Kernels that write and read frames.
#pragma once

#include <cstdint>

#include "base/device.h"
#include "codec/frame_kernels.h"

namespace bagua {

constexpr int kFrameThreads = 128;
constexpr int kWordsPerFrame = static_cast<int>(sizeof(FrameWords) / sizeof(uint64_t));

// The frames of one launch, as they travel in a kernel's parameters, which have 4 KiB in all.
struct FramesToWrite {
  static constexpr int kCapacity = 96;
  int32_t count = 0;
  uint64_t* places[kCapacity];
  uint64_t words[kCapacity * kWordsPerFrame];
};
struct FramesToRead {
  static constexpr int kCapacity = 480;
  int32_t count = 0;
  const uint64_t* places[kCapacity];
};
static_assert(sizeof(FramesToWrite) <= 4096 - 64 && sizeof(FramesToRead) <= 4096 - 64);

// CTAs with a thread for each word.
inline int64_t frame_grid(int64_t frames) {
  return (frames * kWordsPerFrame + kFrameThreads - 1) / kFrameThreads;
}

BAGUA_DEVICE int frame_word() { return static_cast<int>(blockIdx.x * blockDim.x + threadIdx.x); }

__global__ void __launch_bounds__(kFrameThreads)
    write_frames(const __grid_constant__ FramesToWrite frames) {
  const int word = frame_word();
  if (word >= frames.count * kWordsPerFrame) return;
  frames.places[word / kWordsPerFrame][word % kWordsPerFrame] = frames.words[word];
}

__global__ void __launch_bounds__(kFrameThreads)
    read_frames(const __grid_constant__ FramesToRead frames, uint64_t* host) {
  const int word = frame_word();
  if (word >= frames.count * kWordsPerFrame) return;
  host[word] = frames.places[word / kWordsPerFrame][word % kWordsPerFrame];
}

}  // namespace bagua
