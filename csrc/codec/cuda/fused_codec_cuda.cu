#include "base/launch.h"
#include "codec/chunk_batch.h"
#include "codec/codecs.h"
#include "codec/cuda/fused_codec_cuda.h"
#include "codec/cuda/fused_kernels.cuh"

namespace bagua {

namespace {

// Calls function(batch, CTAs) for the tiles of all chunks.
template <typename Function>
void for_each_tile_batch(std::span<const Chunk> chunks, Function function) {
  for_each_batch(chunks, tiles_of, [&](const ChunkBatch& batch) {
    function(batch, (batch.units() + kTileWarps - 1) / kTileWarps);
  });
}

template <TiledFormat Format>
class FusedCodecCuda final : public FusedCodec {
 public:
  void encode_sum(std::span<const Chunk> chunks, const PayloadVersions& versions, float divisor,
                  DType dtype, StreamHandle stream) const override {
    visit_dtype(dtype, [&]<typename T>(T) {
      for_each_tile_batch(chunks, [&](const ChunkBatch& batch, int64_t grid) {
        launch("encode_sum_tiles", encode_sum_tiles<Format, T>, grid, kTileThreads, stream, batch,
               versions, divisor);
      });
    });
  }

  void encode_combined(std::span<const Chunk> chunks, const ThreeArrays& arrays,
                       const ThreeWeights& weights, DType dtype,
                       StreamHandle stream) const override {
    visit_dtype(dtype, [&]<typename T>(T) {
      for_each_tile_batch(chunks, [&](const ChunkBatch& batch, int64_t grid) {
        launch("encode_combined_tiles", encode_combined_tiles<Format, T>, grid, kTileThreads,
               stream, batch, arrays, weights);
      });
    });
  }

  void decode_add_three(std::span<const Chunk> chunks, const ThreeArrays& arrays,
                        const ThreeRows& rows, DType dtype, StreamHandle stream) const override {
    visit_dtype(dtype, [&]<typename T>(T) {
      for_each_tile_batch(chunks, [&](const ChunkBatch& batch, int64_t grid) {
        launch("decode_add_three_tiles", decode_add_three_tiles<Format, T>, grid, kTileThreads,
               stream, batch, arrays, rows);
      });
    });
  }
};

}  // namespace

std::unique_ptr<const FusedCodec> make_fused_cuda_codec(const std::string& name) {
  std::unique_ptr<const FusedCodec> codec;
  for_each_codec([&]<typename Format>(const CodecLine<Format>& line) {
    if constexpr (TiledFormat<Format>) {
      if (name == line.name) codec = std::make_unique<const FusedCodecCuda<Format>>();
    }
  });
  return codec;
}

}  // namespace bagua
