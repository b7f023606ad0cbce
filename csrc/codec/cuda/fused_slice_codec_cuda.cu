#include <algorithm>

#include "base/launch.h"
#include "codec/chunk_batch.h"
#include "codec/codecs.h"
#include "codec/cuda/fused_codec_cuda.h"
#include "codec/cuda/plain_sum_kernels.cuh"
#include "codec/cuda/slice_kernels.cuh"

namespace bagua {

namespace {

// The elements from the first one of all chunks to the last one.
struct Span {
  const std::byte* first;
  int64_t numel;
};

Span span_of(std::span<const Chunk> chunks, DType dtype) {
  const std::byte* first = nullptr;
  const std::byte* end = nullptr;
  for (const Chunk& chunk : chunks) {
    const auto* const x = static_cast<const std::byte*>(chunk.x);
    first = first == nullptr ? x : std::min(first, x);
    end = std::max(end, x + chunk.numel * dtype_bytes(dtype));
  }
  return {first, (end - first) / dtype_bytes(dtype)};
}

template <ChunkRangedFormat Format>
class FusedSliceCodecCuda final : public FusedCodec {
 public:
  // Extents of the slices of the largest batch, of x and of means; or extents and differences.
  // Batches use the same scratch one after the other.
  int64_t scratch_bytes(std::span<const Chunk> chunks, DType dtype) const override {
    const int64_t extents = extent_bytes(chunks);
    return extents + std::max<int64_t>(extents, span_of(chunks, dtype).numel * sizeof(float));
  }

  void encode_sum(std::span<const Chunk> chunks, const PayloadVersions& versions, float divisor,
                  DType dtype, std::byte* scratch, StreamHandle stream) const override {
    auto* const of_own = reinterpret_cast<Extent*>(scratch);
    auto* const of_mean = reinterpret_cast<Extent*>(scratch + extent_bytes(chunks));
    visit_dtype(dtype, [&]<typename T>(T) {
      for_each_batch(chunks, slices_of, [&](const ChunkBatch& batch) {
        launch("scan_slices", scan_slices<Format, T>, batch.units(), kSliceThreads, stream, batch,
               of_own);
        launch_sum(batch, versions, MeanInPlaceArguments<T>{divisor}, of_own, of_mean, stream);
      });
    });
  }

  void sum(std::span<const Chunk> chunks, const PayloadVersions& versions, const SumScale& scale,
           DType dtype, StreamHandle stream) const override {
    visit_dtype(dtype, [&]<typename T>(T) {
      launch_sum_tiles<Format, T>(chunks, versions, scale, stream);
    });
  }

  void encode_sum_residual(std::span<const Chunk> chunks, const PayloadVersions& versions,
                           float divisor, const ResidualArrays& arrays, std::byte* scratch,
                           StreamHandle stream) const override {
    auto* const of_mean = reinterpret_cast<Extent*>(scratch);
    for_each_batch(chunks, slices_of, [&](const ChunkBatch& batch) {
      launch_sum(batch, versions, MeanWithResidualArguments{arrays, divisor}, nullptr, of_mean,
                 stream);
    });
  }

  void encode_combined(std::span<const Chunk> chunks, const ThreeArrays& arrays,
                       const ThreeWeights& weights, DType dtype, std::byte* scratch,
                       StreamHandle stream) const override {
    auto* const of_slice = reinterpret_cast<Extent*>(scratch);
    float* const differences = reinterpret_cast<float*>(scratch + extent_bytes(chunks));
    visit_dtype(dtype, [&]<typename T>(T) {
      const auto* const first = reinterpret_cast<const T*>(span_of(chunks, dtype).first);
      for_each_batch(chunks, slices_of, [&](const ChunkBatch& batch) {
        const int64_t grid = batch.units();
        launch("combine_slices", combine_slices<Format, T>, grid, kSliceThreads, stream, batch,
               arrays, weights, first, differences, of_slice);
        ChunkBatch combined = batch;
        for (int i = 0; i < batch.count; ++i) {
          combined.chunks[i].x = differences + (static_cast<const T*>(batch.chunks[i].x) - first);
        }
        launch("encode_slices", encode_slices<Format, float>, grid, kSliceThreads, stream, combined,
               of_slice);
      });
    });
  }

  void decode_add_three(std::span<const Chunk> chunks, const ThreeArrays& arrays,
                        const ThreeRows& rows, DType dtype, StreamHandle stream) const override {
    launch_decode_add_three<Format>(chunks, arrays, rows, dtype, stream);
  }

 private:
  using Extent = ExtentOf<Format>;

  template <typename Arguments>
  static void launch_sum(const ChunkBatch& batch, const PayloadVersions& versions,
                         const Arguments& arguments, const Extent* of_own, Extent* of_mean,
                         StreamHandle stream) {
    const int64_t grid = batch.units();
    launch("sum_slices", sum_slices<Format, Arguments>, grid, kSliceThreads, stream, batch,
           versions, arguments, of_own, of_mean);
    launch("encode_mean_slices", encode_mean_slices<Format, Arguments>, grid, kSliceThreads, stream,
           batch, arguments, of_mean);
  }

  // A multiple of 16.
  static int64_t extent_bytes(std::span<const Chunk> chunks) {
    int64_t slices = 0;
    for_each_batch(chunks, slices_of,
                   [&](const ChunkBatch& batch) { slices = std::max(slices, batch.units()); });
    return align_payload(slices * static_cast<int64_t>(sizeof(Extent)));
  }
};

}  // namespace

std::unique_ptr<const FusedCodec> make_fused_slice_codec(const std::string& name) {
  std::unique_ptr<const FusedCodec> codec;
  for_each_codec([&]<typename Format>(const CodecLine<Format>& line) {
    if constexpr (ChunkRangedFormat<Format>) {
      if (name == line.name) codec = std::make_unique<const FusedSliceCodecCuda<Format>>();
    }
  });
  return codec;
}

}  // namespace bagua
