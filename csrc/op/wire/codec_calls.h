// How the ops call a codec: split over threads on CPU, all at once on a device.
#pragma once

#include <memory>
#include <span>
#include <vector>

#include <ATen/Parallel.h>
#include <ATen/core/Tensor.h>

#include "base/check.h"
#include "codec/codec.h"
#include "codec/fused_codec.h"
#include "comm/device_stream.h"
#include "ledger/scratch.h"
#include "op/wire/part_layout.h"

namespace bagua {

// Calls function(first, end) for tiles [first, end) that together are [begin, end): one tile at a
// time on CPU, several threads at once, so that a tile stays in cache; all of them in one call on a
// device, which would rather have few large launches.
template <typename Function>
void for_tiles(at::Device device, int64_t begin, int64_t end, Function function) {
  if (begin == end) return;
  if (!device.is_cpu()) return function(begin, end);
  at::parallel_for(begin, end, 1, [&](int64_t first, int64_t last) {
    for (int64_t tile = first; tile < last; ++tile) function(tile, tile + 1);
  });
}

// Appends tiles [first_tile, end_tile) of a part as chunks. x: the first element of the first of
// them; message: the part's first frame.
inline void append_chunks(std::vector<Chunk>& chunks, const PartLayout& layout, int64_t first_tile,
                          int64_t end_tile, void* x, int64_t element_bytes, std::byte* message) {
  auto* values = static_cast<std::byte*>(x);
  for (int64_t tile = first_tile; tile < end_tile; ++tile) {
    const int64_t numel = layout.numel(tile, tile + 1);
    chunks.push_back({values, message + layout.payload_offset(tile), numel});
    values += numel * element_bytes;
  }
}

// The dtype in which a codec takes a bucket of `type`; f64 is cast to f32 before. Throws Error.
inline DType codec_dtype(at::ScalarType type) {
  switch (type) {
    case at::kFloat:
      return DType::kFloat32;
    case at::kHalf:
      return DType::kFloat16;
    case at::kBFloat16:
      return DType::kBFloat16;
    default:
      throw Error(concat("a codec takes float32, float16, bfloat16 or float64 buckets, not ",
                         c10::toString(type),
                         ". Exclude the parameter through _bagua_params_and_buffers_to_ignore."));
  }
}

// A codec on one device for chunks of one dtype, on the calling thread's current stream.
//
// Thread safety: on CPU, as Codec; on a device one thread, the lane that owns the scratch.
class CodecCalls {
 public:
  CodecCalls(const Codec& codec, DType dtype, at::Device device, Scratch& scratch)
      : codec_(codec), dtype_(dtype), device_(device), scratch_(scratch) {}

  void encode(std::span<const Chunk> chunks) const {
    codec_.encode(chunks, dtype_, scratch_for(chunks), stream());
  }
  // The chunks are f32, and hold x - decoded afterwards.
  void encode_residual(std::span<const Chunk> chunks) const {
    codec_.encode_residual(chunks, scratch_for(chunks), stream());
  }
  void decode(std::span<const Chunk> chunks) const { codec_.decode(chunks, dtype_, stream()); }
  // x += weight * decoded, where x is f32.
  void decode_add(std::span<const Chunk> chunks, float weight = 1.0f) const {
    codec_.decode_add(chunks, dtype_, weight, stream());
  }
  // Calls `call`, such as &CodecCalls::encode, for the chunks: one by one on CPU, several threads
  // at once; all of them in one call on a device.
  template <typename Call, typename... Arguments>
  void for_all(std::span<const Chunk> chunks, Call call, Arguments... arguments) const {
    for_tiles(device_, 0, static_cast<int64_t>(chunks.size()), [&](int64_t first, int64_t last) {
      (this->*call)(chunks.subspan(first, last - first), arguments...);
    });
  }

  // The codec's fused kernels, null where it has none, with the scratch and the stream to call them
  // with.
  const FusedCodec* fused() const { return codec_.fused(); }
  std::byte* fused_scratch(std::span<const Chunk> chunks, DType dtype) const {
    return scratch_of(codec_.fused()->scratch_bytes(chunks, dtype));
  }
  StreamHandle stream() const { return current_stream_handle(device_); }

 private:
  std::byte* scratch_for(std::span<const Chunk> chunks) const {
    return scratch_of(codec_.scratch_bytes(chunks, dtype_));
  }
  std::byte* scratch_of(int64_t bytes) const {
    if (bytes == 0) return nullptr;
    return static_cast<std::byte*>(
        scratch_.get(Scratch::kCodec, bytes, at::kByte, device_).data_ptr());
  }

  const Codec& codec_;
  const DType dtype_;
  const at::Device device_;
  Scratch& scratch_;
};

}  // namespace bagua
