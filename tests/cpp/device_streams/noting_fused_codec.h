// Fused kernels of the fake device.
#pragma once

#include <memory>
#include <utility>

#include "codec/chunk_batch.h"
#include "device_streams/noting.h"
#include "kernels/fused_reference.h"

namespace bagua::fake {

inline void note_other_rows(const char* what, StreamHandle stream, const Chunk& chunk,
                            const PayloadVersions& versions, int64_t bytes) {
  for (int row = 0; row < versions.rows; ++row) {
    if (row == versions.own) continue;
    const std::byte* const payload =
        versions.first + row * versions.stride + (chunk.payload - versions.results);
    note(what, stream, payload, bytes, false);
  }
}

// One launch, which reads x and the other rows and writes x. bytes_of(chunk): of its payload.
template <typename BytesOf>
void note_sum(StreamHandle stream, std::span<const Chunk> chunks, const PayloadVersions& versions,
              DType dtype, BytesOf bytes_of) {
  count_launches(chunks);
  for (const Chunk& chunk : chunks) {
    note_other_rows("sum", stream, chunk, versions, bytes_of(chunk));
    for (const bool write : {false, true}) {
      note("sum", stream, chunk.x, chunk.numel * dtype_bytes(dtype), write);
    }
  }
}

class NotingPlainSum final : public PlainSum {
 public:
  void sum(std::span<const Chunk> chunks, const PayloadVersions& versions, const SumScale& scale,
           DType dtype, StreamHandle stream) const override {
    note_sum(stream, chunks, versions, dtype,
             [&](const Chunk& chunk) { return chunk.numel * dtype_bytes(dtype); });
    PlainSumReference().sum(chunks, versions, scale, dtype, nullptr);
  }
};

// Does the steps one by one, and notes what the kernels would touch.
class NotingFusedCodec final : public FusedCodec {
 public:
  explicit NotingFusedCodec(std::shared_ptr<const Codec> codec)
      : codec_(codec), reference_(std::move(codec)) {}

  // Extents, and differences of f32, where a range is a whole chunk.
  int64_t scratch_bytes(std::span<const Chunk> chunks, DType) const override {
    int64_t bytes = 0;
    for (const Chunk& chunk : chunks) bytes += 64 + chunk.numel * int64_t{sizeof(float)};
    return has_slices() ? bytes : 0;
  }

  void encode_sum(std::span<const Chunk> chunks, const PayloadVersions& versions, float divisor,
                  DType dtype, std::byte* scratch, StreamHandle stream) const override {
    // Where a range is a whole chunk: the range of x, that of the mean, and its payload.
    count_launches(chunks, has_slices() ? 3 : 1);
    note_extents("encode_sum", stream, chunks, scratch, 2);
    for (const Chunk& chunk : chunks) {
      const int64_t bytes = codec_->payload_bytes(dtype, chunk.numel);
      note_other_rows("encode_sum", stream, chunk, versions, bytes);
      const auto note_x = [&](bool write) {
        note("encode_sum", stream, chunk.x, chunk.numel * dtype_bytes(dtype), write);
      };
      if (has_slices()) {
        for (const bool write : {false, false, true}) note_x(write);
      }
      for (const bool write : {false, true}) note_x(write);
      note("encode_sum", stream, chunk.payload, bytes, true);
    }
    reference_.encode_sum(chunks, versions, divisor, dtype, nullptr, nullptr);
  }

  void sum(std::span<const Chunk> chunks, const PayloadVersions& versions, const SumScale& scale,
           DType dtype, StreamHandle stream) const override {
    note_sum(stream, chunks, versions, dtype,
             [&](const Chunk& chunk) { return codec_->payload_bytes(dtype, chunk.numel); });
    reference_.sum(chunks, versions, scale, dtype, nullptr);
  }

  void encode_sum_residual(std::span<const Chunk> chunks, const PayloadVersions& versions,
                           float divisor, const ResidualArrays& arrays, std::byte* scratch,
                           StreamHandle stream) const override {
    // Where a range is a whole chunk: what is encoded and its range, then the payload.
    const char* const what = "encode_sum_residual";
    count_launches(chunks, has_slices() ? 2 : 1);
    note_extents(what, stream, chunks, scratch, 1);
    for (const Chunk& chunk : chunks) {
      note_other_rows(what, stream, chunk, versions, payload_bytes(chunk));
      const int64_t bytes = chunk.numel * int64_t{sizeof(float)};
      const int64_t first = static_cast<const float*>(chunk.x) - arrays.x;
      note(what, stream, arrays.before + first, bytes, false);
      for (const bool write : {false, true}) {
        note(what, stream, chunk.payload, payload_bytes(chunk), write);
      }
      note(what, stream, arrays.result + first, bytes, true);
      note(what, stream, chunk.x, bytes, true);
      if (!has_slices()) continue;
      for (const bool write : {false, true}) note(what, stream, chunk.x, bytes, write);
    }
    reference_.encode_sum_residual(chunks, versions, divisor, arrays, nullptr, nullptr);
  }

  void encode_combined(std::span<const Chunk> chunks, const ThreeArrays& arrays,
                       const ThreeWeights& weights, DType dtype, std::byte* scratch,
                       StreamHandle stream) const override {
    // Where a range is a whole chunk: differences and their range, then the payload.
    count_launches(chunks, has_slices() ? 2 : 1);
    note_extents("encode_combined", stream, chunks, scratch, 1);
    for (const Chunk& chunk : chunks) {
      note("encode_combined", stream, chunk.x, chunk.numel * dtype_bytes(dtype), false);
      note_arrays("encode_combined", stream, chunk, arrays, dtype, false);
      for (const bool write : {true, false}) {
        const int64_t bytes = has_slices() ? chunk.numel * int64_t{sizeof(float)} : 0;
        note("encode_combined", stream, scratch, bytes, write);
      }
      note("encode_combined", stream, chunk.payload, payload_bytes(chunk), true);
    }
    reference_.encode_combined(chunks, arrays, weights, dtype, nullptr, nullptr);
  }

  void decode_add_three(std::span<const Chunk> chunks, const ThreeArrays& arrays,
                        const ThreeRows& rows, DType dtype, StreamHandle stream) const override {
    count_launches(chunks);
    for (const Chunk& chunk : chunks) {
      for (const std::byte* const row : {rows.own, rows.left, rows.right}) {
        note("decode_add_three", stream, row + (chunk.payload - rows.own), payload_bytes(chunk),
             false);
      }
      for (const bool write : {false, true}) {
        note_arrays("decode_add_three", stream, chunk, arrays, dtype, write);
      }
      note("decode_add_three", stream, chunk.x, chunk.numel * dtype_bytes(dtype), true);
    }
    reference_.decode_add_three(chunks, arrays, rows, dtype, nullptr);
  }

 private:
  bool has_slices() const { return codec_->block_numel() == 0; }
  void note_extents(const char* what, StreamHandle stream, std::span<const Chunk> chunks,
                    std::byte* scratch, int64_t sets) const {
    if (!has_slices()) return;
    expect(scratch != nullptr, what, " needs its scratch");
    for (const bool write : {true, false}) {
      note(what, stream, scratch, sets * 32 * static_cast<int64_t>(chunks.size()), write);
    }
  }
  int64_t payload_bytes(const Chunk& chunk) const {
    return codec_->payload_bytes(DType::kFloat32, chunk.numel);
  }
  static void note_arrays(const char* what, StreamHandle stream, const Chunk& chunk,
                          const ThreeArrays& arrays, DType dtype, bool write) {
    const int64_t offset =
        (static_cast<const char*>(chunk.x) - static_cast<const char*>(arrays.x)) /
        dtype_bytes(dtype);
    for (const float* const array : {arrays.own, arrays.left, arrays.right}) {
      note(what, stream, array + offset, chunk.numel * int64_t{sizeof(float)}, write);
    }
  }

  const std::shared_ptr<const Codec> codec_;
  const FusedReference reference_;
};

}  // namespace bagua::fake
