// The interface of frames in device memory.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <span>

#include "codec/codec.h"

namespace bagua {

// A frame (op/wire/frame.h): to a codec, words in front of a payload.
using FrameWords = std::array<uint64_t, 4>;

// A frame on its way to device memory.
struct PlacedFrame {
  std::byte* place;  // at a multiple of 8
  FrameWords words;
};

// Each function is one launch for as many frames as a launch's parameters hold.
//
// Thread safety: const and stateless. Ownership: none, all memory is the caller's. Ordering: on
// `stream`. May fail: Error where CUDA refuses a launch.
class FrameKernels {
 public:
  virtual ~FrameKernels() = default;

  // Writes each frame to its place, which is in device memory.
  virtual void write(std::span<const PlacedFrame> frames, StreamHandle stream) const = 0;

  // Copies the frames at `places`, in device memory, to `host`, side by side: pinned host memory.
  virtual void read(std::span<const std::byte* const> places, FrameWords* host,
                    StreamHandle stream) const = 0;
};

}  // namespace bagua
