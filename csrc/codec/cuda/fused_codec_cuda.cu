#include "base/launch.h"
#include "codec/chunk_batch.h"
#include "codec/codecs.h"
#include "codec/cuda/fused_codec_cuda.h"
#include "codec/cuda/plain_sum_kernels.cuh"
#include "codec/cuda/sum_kernels.cuh"
#include "codec/cuda/three_array_kernels.cuh"
#include "codec/plain_sum.h"

namespace bagua {

namespace {

template <TiledFormat Format>
class FusedCodecCuda final : public FusedCodec {
 public:
  int64_t scratch_bytes(std::span<const Chunk>, DType) const override { return 0; }

  void encode_sum(std::span<const Chunk> chunks, const PayloadVersions& versions, float divisor,
                  DType dtype, std::byte*, StreamHandle stream) const override {
    visit_dtype(dtype, [&]<typename T>(T) {
      launch_sum(chunks, versions, MeanInPlaceArguments<T>{divisor}, stream);
    });
  }

  void sum(std::span<const Chunk> chunks, const PayloadVersions& versions, const SumScale& scale,
           DType dtype, StreamHandle stream) const override {
    visit_dtype(dtype, [&]<typename T>(T) {
      launch_sum_tiles<Format, T>(chunks, versions, scale, stream);
    });
  }

  void encode_sum_residual(std::span<const Chunk> chunks, const PayloadVersions& versions,
                           float divisor, const ResidualArrays& arrays, std::byte*,
                           StreamHandle stream) const override {
    launch_sum(chunks, versions, MeanWithResidualArguments{arrays, divisor}, stream);
  }

  void encode_combined(std::span<const Chunk> chunks, const ThreeArrays& arrays,
                       const ThreeWeights& weights, DType dtype, std::byte*,
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
    launch_decode_add_three<Format>(chunks, arrays, rows, dtype, stream);
  }

 private:
  template <typename Arguments>
  static void launch_sum(std::span<const Chunk> chunks, const PayloadVersions& versions,
                         const Arguments& arguments, StreamHandle stream) {
    for_each_tile_batch(chunks, [&](const ChunkBatch& batch, int64_t grid) {
      launch("encode_sum_tiles", encode_sum_tiles<Format, Arguments>, grid, kTileThreads, stream,
             batch, versions, arguments);
    });
  }
};

class PlainSumCuda final : public PlainSum {
 public:
  void sum(std::span<const Chunk> chunks, const PayloadVersions& versions, const SumScale& scale,
           DType dtype, StreamHandle stream) const override {
    visit_dtype(dtype, [&]<typename T>(T) {
      launch_sum_tiles<PlainElements<T>, T>(chunks, versions, scale, stream);
    });
  }
};

}  // namespace

std::shared_ptr<const PlainSum> make_cuda_plain_sum() {
  auto plain = std::make_shared<const PlainSumCuda>();
  const LoadsKernels here;
  float x = 0;
  const Chunk chunk{&x, nullptr, 1};
  for (const DType dtype : {DType::kFloat32, DType::kFloat16, DType::kBFloat16}) {
    plain->sum({&chunk, 1}, {}, {}, dtype, nullptr);
  }
  return plain;
}

std::unique_ptr<const FusedCodec> make_fused_cuda_codec(const std::string& name) {
  std::unique_ptr<const FusedCodec> codec = make_fused_slice_codec(name);
  for_each_codec([&]<typename Format>(const CodecLine<Format>& line) {
    if constexpr (TiledFormat<Format>) {
      if (name == line.name) codec = std::make_unique<const FusedCodecCuda<Format>>();
    }
  });
  return codec;
}

}  // namespace bagua
