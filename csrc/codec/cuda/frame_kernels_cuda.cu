#include <algorithm>

#include "base/launch.h"
#include "codec/cuda/frame_kernels.cuh"
#include "codec/cuda/frame_kernels_cuda.h"

namespace bagua {

namespace {

class FrameKernelsCuda final : public FrameKernels {
 public:
  void write(std::span<const PlacedFrame> frames, StreamHandle stream) const override {
    while (!frames.empty()) {
      FramesToWrite batch;
      for (const PlacedFrame& frame :
           frames.first(std::min<size_t>(frames.size(), FramesToWrite::kCapacity))) {
        batch.places[batch.count] = reinterpret_cast<uint64_t*>(frame.place);
        std::ranges::copy(frame.words, batch.words + batch.count * kWordsPerFrame);
        ++batch.count;
      }
      launch("write_frames", write_frames, frame_grid(batch.count), kFrameThreads, stream, batch);
      frames = frames.subspan(batch.count);
    }
  }

  void read(std::span<const std::byte* const> places, FrameWords* host,
            StreamHandle stream) const override {
    while (!places.empty()) {
      FramesToRead batch;
      for (const std::byte* place :
           places.first(std::min<size_t>(places.size(), FramesToRead::kCapacity))) {
        batch.places[batch.count++] = reinterpret_cast<const uint64_t*>(place);
      }
      launch("read_frames", read_frames, frame_grid(batch.count), kFrameThreads, stream, batch,
             reinterpret_cast<uint64_t*>(host));
      places = places.subspan(batch.count);
      host += batch.count;
    }
  }
};

}  // namespace

const FrameKernels& cuda_frame_kernels() {
  static const FrameKernelsCuda kernels;
  return kernels;
}

void load_kernels(const FrameKernels& kernels) {
  const PlacedFrame frame{};
  const std::byte* const place = nullptr;
  kernels.write({&frame, 1}, nullptr);
  kernels.read({&place, 1}, nullptr, nullptr);
}

}  // namespace bagua
