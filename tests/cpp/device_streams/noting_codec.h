// A codec of the fake device.
#pragma once

#include <memory>
#include <string>

#include "codec/factory.h"
#include "device_streams/noting.h"
#include "device_streams/noting_frames.h"
#include "device_streams/noting_fused_codec.h"

namespace bagua::fake {

// The codecs of a real device run here on its "memory"; what they touch is noted.
class NotingCodec final : public Codec {
 public:
  explicit NotingCodec(const std::string& name) : codec_(make_codec(name)), fused_(codec_) {}
  Processor processor() const override { return Processor::kCuda; }
  int64_t payload_bytes(DType dtype, int64_t numel) const override {
    return codec_->payload_bytes(dtype, numel);
  }
  int64_t scratch_bytes(std::span<const Chunk> chunks, DType) const override {
    return 16 * static_cast<int64_t>(chunks.size());
  }
  void encode(std::span<const Chunk> chunks, DType dtype, std::byte* scratch,
              StreamHandle stream) const override {
    expect(scratch != nullptr, "encode needs its scratch");
    const int64_t passes = block_numel() == 0 ? 2 : 1;  // a range of a whole chunk is found first
    count_launches(chunks, passes);
    note("encode's scratch", stream, scratch, scratch_bytes(chunks, dtype), true);
    for (const Chunk& chunk : chunks) {
      for (int64_t pass = 0; pass < passes; ++pass) {
        note("encode", stream, chunk.x, chunk.numel * dtype_bytes(dtype), false);
      }
      note("encode", stream, chunk.payload, payload_bytes(dtype, chunk.numel), true);
    }
    codec_->encode(chunks, dtype, nullptr, nullptr);
  }
  void decode(std::span<const Chunk> chunks, DType dtype, StreamHandle stream) const override {
    count_launches(chunks);
    for (const Chunk& chunk : chunks) {
      note("decode", stream, chunk.payload, payload_bytes(dtype, chunk.numel), false);
      note("decode", stream, chunk.x, chunk.numel * dtype_bytes(dtype), true);
    }
    codec_->decode(chunks, dtype, nullptr);
  }
  void decode_add(std::span<const Chunk> chunks, DType dtype, float weight,
                  StreamHandle stream) const override {
    count_launches(chunks);
    for (const Chunk& chunk : chunks) {
      note("decode_add", stream, chunk.payload, payload_bytes(dtype, chunk.numel), false);
      note("decode_add", stream, chunk.x, chunk.numel * 4, false);
      note("decode_add", stream, chunk.x, chunk.numel * 4, true);
    }
    codec_->decode_add(chunks, dtype, weight, nullptr);
  }
  void encode_residual(std::span<const Chunk> chunks, std::byte* scratch,
                       StreamHandle stream) const override {
    if (block_numel() == 0) return Codec::encode_residual(chunks, scratch, stream);
    count_launches(chunks);
    for (const Chunk& chunk : chunks) {
      for (const bool write : {false, true}) {
        note("encode_residual", stream, chunk.x, chunk.numel * 4, write);
      }
      note("encode_residual", stream, chunk.payload, payload_bytes(DType::kFloat32, chunk.numel),
           true);
    }
    codec_->encode_residual(chunks, nullptr, nullptr);
  }
  int64_t block_numel() const override { return codec_->block_numel(); }
  const FusedCodec* fused() const override { return &fused_; }
  const FrameKernels* frames() const override { return &frames_; }
  const std::string& name() const override { return codec_->name(); }

 private:
  std::shared_ptr<const Codec> codec_;
  const NotingFusedCodec fused_;
  const NotingFrames frames_;
};

}  // namespace bagua::fake
