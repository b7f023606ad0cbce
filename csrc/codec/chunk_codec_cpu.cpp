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
  decode_chunk<Format, T>(payload, numel, StoreAhead<T>{{x}});
}

template <typename Format, typename T>
BAGUA_PER_INSTRUCTION_SET void decode_add_on_cpu(const std::byte* payload, float* sum,
                                                 int64_t numel, float weight) {
  decode_chunk<Format, T>(payload, numel, AddWeightedAhead<T>{{sum, weight}});
}

template <typename Format>
class ChunkCodecCpu final : public Codec {
 public:
  explicit ChunkCodecCpu(std::string name) : name_(std::move(name)) {}

  int64_t payload_bytes(DType dtype, int64_t chunk_numel) const override {
    return format_payload_bytes<Format>(dtype_bytes(dtype), chunk_numel);
  }

  int64_t scratch_bytes(DType, int64_t, int) const override { return 0; }

  void encode(const void* x, DType dtype, int64_t chunk_numel, int chunks, std::byte* payload,
              std::byte*, StreamHandle) const override {
    const int64_t stride = payload_bytes(dtype, chunk_numel);
    if (stride == 0) return;  // payload may be null
    visit_dtype(dtype, [&]<typename T>(T) {
      for (int64_t i = 0; i < chunks; ++i) {
        encode_on_cpu<Format>(static_cast<const T*>(x) + i * chunk_numel, chunk_numel,
                              payload + i * stride);
      }
    });
  }

  void decode(const std::byte* payload, int chunks, void* x, DType dtype, int64_t chunk_numel,
              StreamHandle) const override {
    const int64_t stride = payload_bytes(dtype, chunk_numel);
    visit_dtype(dtype, [&]<typename T>(T) {
      for (int64_t i = 0; i < chunks; ++i) {
        decode_on_cpu<Format>(payload + i * stride, static_cast<T*>(x) + i * chunk_numel,
                              chunk_numel);
      }
    });
  }

  void decode_add(const std::byte* payload, DType dtype, float* sum, int64_t chunk_numel,
                  float weight, StreamHandle) const override {
    visit_dtype(dtype, [&]<typename T>(T) {
      decode_add_on_cpu<Format, T>(payload, sum, chunk_numel, weight);
    });
  }

  int64_t block_numel() const override { return format_block_numel<Format>(); }

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
