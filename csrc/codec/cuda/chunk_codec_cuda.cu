#include <algorithm>
#include <utility>

#include "base/launch.h"
#include "codec/chunk_batch.h"
#include "codec/codecs.h"
#include "codec/cuda/chunk_codec_cuda.h"
#include "codec/cuda/decode_kernels.cuh"
#include "codec/cuda/encode_kernels.cuh"
#include "codec/cuda/frame_kernels_cuda.h"
#include "codec/cuda/fused_codec_cuda.h"
#include "codec/cuda/range_kernels.cuh"
#include "codec/cuda/residual_kernels.cuh"

namespace bagua {

namespace {

template <typename Format>
class ChunkCodecCuda final : public Codec {
 public:
  explicit ChunkCodecCuda(std::string name)
      : name_(std::move(name)), fused_(make_fused_cuda_codec(name_)) {}

  Processor processor() const override { return Processor::kCuda; }

  int64_t payload_bytes(DType dtype, int64_t numel) const override {
    return format_payload_bytes<Format>(dtype, numel);
  }

  // One extent per slice of the largest batch; batches use the same scratch one after the other.
  int64_t scratch_bytes(std::span<const Chunk> chunks, DType) const override {
    int64_t most = 0;
    int64_t bytes_per_slice = 0;
    if constexpr (ChunkRangedFormat<Format>) {
      bytes_per_slice = sizeof(ExtentOf<Format>);
      for_each_batch(chunks, slices_of,
                     [&](const ChunkBatch& batch) { most = std::max(most, batch.units()); });
    }
    return most * bytes_per_slice;
  }

  void encode(std::span<const Chunk> chunks, DType dtype, std::byte* scratch,
              StreamHandle stream) const override {
    visit_dtype(dtype, [&]<typename T>(T) {
      if constexpr (ChunkRangedFormat<Format>) {
        ExtentOf<Format>* const of_slice = reinterpret_cast<ExtentOf<Format>*>(scratch);
        for_each_batch(chunks, slices_of, [&](const ChunkBatch& batch) {
          launch("scan_slices", scan_slices<Format, T>, batch.units(), kSliceThreads, stream, batch,
                 of_slice);
          launch("encode_slices", encode_slices<Format, T>, batch.units(), kSliceThreads, stream,
                 batch, of_slice);
        });
      } else {
        for_each_tile_batch(chunks, [&](const ChunkBatch& batch, int64_t grid) {
          launch("encode_tiles", encode_tiles<Format, T>, grid, kTileThreads, stream, batch);
        });
      }
    });
  }

  void decode(std::span<const Chunk> chunks, DType dtype, StreamHandle stream) const override {
    visit_dtype(dtype, [&]<typename T>(T) {
      for_each_tile_batch(chunks, [&](const ChunkBatch& batch, int64_t grid) {
        launch("decode_tiles", decode_tiles<Format, T>, grid, kTileThreads, stream, batch);
      });
    });
  }

  void decode_add(std::span<const Chunk> chunks, DType dtype, float weight,
                  StreamHandle stream) const override {
    visit_dtype(dtype, [&]<typename T>(T) {
      for_each_tile_batch(chunks, [&](const ChunkBatch& batch, int64_t grid) {
        launch("decode_add_tiles", decode_add_tiles<Format, T>, grid, kTileThreads, stream, batch,
               weight);
      });
    });
  }

  void encode_residual(std::span<const Chunk> chunks, std::byte* scratch,
                       StreamHandle stream) const override {
    if constexpr (TiledFormat<Format>) {
      for_each_tile_batch(chunks, [&](const ChunkBatch& batch, int64_t grid) {
        launch("encode_residual_tiles", encode_residual_tiles<Format>, grid, kTileThreads, stream,
               batch);
      });
    } else {
      Codec::encode_residual(chunks, scratch, stream);
    }
  }

  int64_t block_numel() const override { return Format::kBlockNumel; }

  const FusedCodec* fused() const override { return fused_.get(); }

  const FrameKernels* frames() const override { return &cuda_frame_kernels(); }

  const std::string& name() const override { return name_; }

 private:
  const std::string name_;
  const std::unique_ptr<const FusedCodec> fused_;
};

// See Note [Kernels are loaded where they are made].
void load_kernels(const Codec& codec) {
  const LoadsKernels here;
  float x = 0;
  std::byte payload{};
  const Chunk chunk{&x, &payload, 1};
  const std::span chunks(&chunk, 1);
  const FusedCodec& fused = *codec.fused();
  for (const DType dtype : {DType::kFloat32, DType::kFloat16, DType::kBFloat16}) {
    codec.encode(chunks, dtype, nullptr, nullptr);
    codec.decode(chunks, dtype, nullptr);
    codec.decode_add(chunks, dtype, 1.0f, nullptr);
    fused.encode_sum(chunks, {}, 1.0f, dtype, nullptr, nullptr);
    fused.sum(chunks, {}, {}, dtype, nullptr);
    fused.encode_combined(chunks, {}, {}, dtype, nullptr, nullptr);
    fused.decode_add_three(chunks, {}, {}, dtype, nullptr);
  }
  codec.encode_residual(chunks, nullptr, nullptr);
  fused.encode_sum_residual(chunks, {}, 1.0f, {}, nullptr, nullptr);
  load_kernels(*codec.frames());
}

}  // namespace

bool has_cuda_codecs() { return true; }

std::shared_ptr<const Codec> make_cuda_codec(const std::string& name) {
  std::shared_ptr<const Codec> codec;
  for_each_codec([&]<typename Format>(const CodecLine<Format>& line) {
    if (name == line.name) codec = std::make_shared<const ChunkCodecCuda<Format>>(name);
  });
  if (codec != nullptr) load_kernels(*codec);
  return codec;
}

}  // namespace bagua
