// The codec of sparse messages on the fake device.
#pragma once

#include <memory>

#include "device_streams/noting.h"
#include "device_streams/noting_frames.h"
#include "kernels/sparse_reference.h"
#include "op/sparse.h"

namespace bagua::fake {

// Notes what the kernels would touch, and how often they read it (codec/cuda/sparse_codec_cuda.cu).
class NotingSparseCodec final : public SparseCodec {
 public:
  int64_t scratch_bytes(const SparseShape& shape, int64_t ranks) const override {
    return ranks * shape.k * int64_t{sizeof(uint32_t)} + 65536;
  }

  void take(const SparseShape& shape, void* x, std::byte* message, std::byte* scratch,
            StreamHandle stream) const override {
    const int64_t passes = shape.element_bytes == 4 ? 3 : 6;
    count({.launches = passes + 5});
    const int64_t bytes = shape.numel * shape.element_bytes;
    for (int64_t pass = 0; pass < passes + 2; ++pass) note("take", stream, x, bytes, false);
    note("take", stream, scratch, scratch_bytes(shape, 1), true);
    note("take", stream, message, message_bytes(shape), true);
    // Writes the chosen elements of x only, which may be anywhere in it.
    Device::instance().access(current_stream(), "take", x, bytes, true);
    count({.bytes_written = shape.k * shape.element_bytes});
    reference_.take(shape, x, message, nullptr, nullptr);
  }

  void add(const SparseShape& shape, const SparseMessages& messages, void* sum, int32_t* faults,
           std::byte* scratch, StreamHandle stream) const override {
    count({.launches = 3});
    const int64_t indices = messages.ranks * shape.k * int64_t{sizeof(uint32_t)};
    note("add", stream, messages.first,
         (messages.ranks - 1) * messages.stride + message_bytes(shape), false);
    note("add", stream, scratch, indices, true);
    note("add", stream, scratch, indices, false);
    note("add", stream, faults, messages.ranks * int64_t{sizeof(int32_t)}, true);
    note("add", stream, sum, shape.numel * shape.element_bytes, true);
    reference_.add(shape, messages, sum, faults, nullptr, nullptr);
  }

  const FrameKernels& frames() const override { return frames_; }

 private:
  static int64_t message_bytes(const SparseShape& shape) {
    return shape.values_bytes + shape.indices_bytes;
  }

  const SparseReference reference_;
  const NotingFrames frames_;
};

inline Sparse::Options noting_sparse_options(Checksum checksum = Checksum::kOff) {
  return {.checksum = checksum, .device = std::make_shared<NotingSparseCodec>()};
}

}  // namespace bagua::fake
