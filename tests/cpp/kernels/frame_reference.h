// Frames on the CPU, behind the interface of a device's kernels.
#pragma once

#include <cstring>

#include "codec/frame_kernels.h"

namespace bagua {

class FrameReference final : public FrameKernels {
 public:
  void write(std::span<const PlacedFrame> frames, StreamHandle) const override {
    for (const auto& [place, words] : frames) std::memcpy(place, words.data(), sizeof words);
  }

  void read(std::span<const std::byte* const> places, FrameWords* host,
            StreamHandle) const override {
    for (const std::byte* place : places) std::memcpy((host++)->data(), place, sizeof(FrameWords));
  }
};

}  // namespace bagua
