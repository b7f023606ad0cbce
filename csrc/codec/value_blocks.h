// The values of a chunked sparse message: blocks of the codec bit2_block without the padding that
// each payload of a codec has (docs/wire-format.md, "Chunked sparse messages").
#pragma once

#include <cstddef>
#include <cstdint>

namespace bagua {

// Sizes for k values: one header per block of at most 256, and their codes.
int64_t value_headers_bytes(int64_t k);
int64_t value_codes_bytes(int64_t k);

// Writes all bytes of both. `headers` lie at a multiple of 2. Stateless, reentrant.
void encode_values(const float* values, int64_t k, std::byte* headers, uint8_t* codes);

// For bytes from anywhere. Finite where the headers are.
void decode_values(const std::byte* headers, const uint8_t* codes, int64_t k, float* values);

}  // namespace bagua
