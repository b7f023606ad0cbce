#include "codec/value_blocks.h"

#include "base/per_instruction_set.h"
#include "codec/chunk_loops_cpu.h"
#include "codec/codecs/bit2_block.h"

namespace bagua {
namespace {

using Format = Bit2Block;
constexpr int64_t kHeaderBytes = sizeof(HeaderOf<Format, float>);

struct StoreValues : Store<float> {
  template <RangedFormat>
  BAGUA_HD void prefetch_tile(const uint8_t*, int64_t, int64_t) const {}
};

BAGUA_PER_INSTRUCTION_SET void encode_blocks(const float* values, int64_t k, std::byte* headers,
                                             uint8_t* codes) {
  for_each_range<Format>(
      k, [&](int64_t begin, int64_t numel, int64_t number) __attribute__((always_inline)) {
        encode_range<Format>(values, begin, numel, k, headers + number * kHeaderBytes, codes);
      });
}

BAGUA_PER_INSTRUCTION_SET void decode_blocks(const std::byte* headers, const uint8_t* codes,
                                             int64_t k, float* values) {
  for_each_range<Format>(
      k, [&](int64_t begin, int64_t numel, int64_t number) __attribute__((always_inline)) {
        decode_range<Format, float>(headers + number * kHeaderBytes, codes, begin, numel, k,
                                    StoreValues{{values}});
      });
}

}  // namespace

int64_t value_headers_bytes(int64_t k) {
  return (k + Format::kBlockNumel - 1) / Format::kBlockNumel * kHeaderBytes;
}

int64_t value_codes_bytes(int64_t k) { return code_bytes<Format>(k); }

void encode_values(const float* values, int64_t k, std::byte* headers, uint8_t* codes) {
  encode_blocks(values, k, headers, codes);
}

void decode_values(const std::byte* headers, const uint8_t* codes, int64_t k, float* values) {
  decode_blocks(headers, codes, k, values);
}

}  // namespace bagua
