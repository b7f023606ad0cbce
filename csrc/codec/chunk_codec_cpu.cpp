#include "codec/chunk_codec_cpu.h"

#include <utility>

#include "base/per_instruction_set.h"
#include "codec/chunk_loops_cpu.h"
#include "codec/codecs.h"

namespace bagua {

namespace {

// All instruction sets give the same bytes: the order of a range's reduction does not matter.

template <typename Format, typename T>
BAGUA_PER_INSTRUCTION_SET void encode_on_cpu(const T* x, int64_t numel, std::byte* payload) {
  encode_chunk<Format>(x, numel, payload);
}

template <typename Format, typename T>
BAGUA_PER_INSTRUCTION_SET void decode_on_cpu(const std::byte* payload, T* x, int64_t numel) {
  decode_chunk<Format, T>(payload, numel, Store<T>{x});
}

template <typename Format, typename T>
BAGUA_PER_INSTRUCTION_SET void decode_add_on_cpu(const std::byte* payload, float* sum,
                                                 int64_t numel, float weight) {
  decode_chunk<Format, T>(payload, numel, AddWeightedAhead<T>{{sum, weight}});
}

template <typename Format>
BAGUA_PER_INSTRUCTION_SET void encode_residual_on_cpu(float* x, int64_t numel, std::byte* payload) {
  encode_chunk<Format>(x, numel, payload,
                       [&](const std::byte* header, const uint8_t* codes, int64_t begin,
                           int64_t of_range) __attribute__((always_inline)) {
                         decode_range<Format, float>(header, codes, begin, of_range, numel,
                                                     AddWeighted<float>{x, -1.0f});
                       });
}

template <typename Format>
class ChunkCodecCpu final : public Codec {
 public:
  explicit ChunkCodecCpu(std::string name) : name_(std::move(name)) {}

  Processor processor() const override { return Processor::kCpu; }

  int64_t payload_bytes(DType dtype, int64_t numel) const override {
    return format_payload_bytes<Format>(dtype, numel);
  }

  int64_t scratch_bytes(std::span<const Chunk>, DType) const override { return 0; }

  void encode(std::span<const Chunk> chunks, DType dtype, std::byte*, StreamHandle) const override {
    visit_dtype(dtype, [&]<typename T>(T) {
      for (const Chunk& chunk : chunks) {
        if (payload_bytes(dtype, chunk.numel) == 0) continue;  // payload may be null
        encode_on_cpu<Format>(static_cast<const T*>(chunk.x), chunk.numel, chunk.payload);
      }
    });
  }

  void decode(std::span<const Chunk> chunks, DType dtype, StreamHandle) const override {
    visit_dtype(dtype, [&]<typename T>(T) {
      for (const Chunk& chunk : chunks) {
        decode_on_cpu<Format>(chunk.payload, static_cast<T*>(chunk.x), chunk.numel);
      }
    });
  }

  void decode_add(std::span<const Chunk> chunks, DType dtype, float weight,
                  StreamHandle) const override {
    visit_dtype(dtype, [&]<typename T>(T) {
      for (const Chunk& chunk : chunks) {
        decode_add_on_cpu<Format, T>(chunk.payload, static_cast<float*>(chunk.x), chunk.numel,
                                     weight);
      }
    });
  }

  // Block by block, which is in cache when it is decoded.
  void encode_residual(std::span<const Chunk> chunks, std::byte* scratch,
                       StreamHandle stream) const override {
    if constexpr (BlockFormat<Format>) {
      for (const Chunk& chunk : chunks) {
        if (chunk.numel == 0) continue;  // payload may be null
        encode_residual_on_cpu<Format>(static_cast<float*>(chunk.x), chunk.numel, chunk.payload);
      }
    } else {
      Codec::encode_residual(chunks, scratch, stream);
    }
  }

  int64_t block_numel() const override { return Format::kBlockNumel; }

  const std::string& name() const override { return name_; }

 private:
  const std::string name_;
};

}  // namespace

std::shared_ptr<const Codec> make_cpu_codec(const std::string& name) {
  std::shared_ptr<const Codec> codec;
  for_each_codec([&]<typename Format>(const CodecLine<Format>& line) {
    if (name == line.name) codec = std::make_shared<const ChunkCodecCpu<Format>>(name);
  });
  return codec;
}

}  // namespace bagua
