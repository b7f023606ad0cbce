// The kernels of frames on the fake device.
#pragma once

#include "device_streams/noting.h"
#include "kernels/frame_reference.h"

namespace bagua::fake {

// Notes what the kernels would touch (codec/cuda/frame_kernels.cuh).
class NotingFrames final : public FrameKernels {
 public:
  void write(std::span<const PlacedFrame> frames, StreamHandle stream) const override {
    count({.launches = 1});
    for (const PlacedFrame& frame : frames) {
      note("write_frames", stream, frame.place, sizeof(FrameWords), true);
    }
    reference_.write(frames, nullptr);
  }

  void read(std::span<const std::byte* const> places, FrameWords* host,
            StreamHandle stream) const override {
    count({.launches = 1});
    for (const std::byte* place : places) {
      note("read_frames", stream, place, sizeof(FrameWords), false);
    }
    note("read_frames", stream, host, static_cast<int64_t>(places.size() * sizeof(FrameWords)),
         true);
    Device::instance().copies_host_memory(current_stream());
    reference_.read(places, host, nullptr);
  }

 private:
  const FrameReference reference_;
};

}  // namespace bagua::fake
