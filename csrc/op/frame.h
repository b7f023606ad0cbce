// The 32 bytes in front of every compressed payload (docs/wire-format.md, "Frames").
#pragma once

#include <cstddef>
#include <cstdint>
#include <string>

namespace bagua {

inline constexpr int64_t kFrameBytes = 32;

// What sender and receiver must agree on before a payload is decoded.
struct Frame {
  uint64_t fingerprint;    // codec, dtype, sizes and bucket: see frame_fingerprint
  uint64_t step;           // number of the round
  uint64_t payload_bytes;  // bytes that follow
};

uint64_t frame_fingerprint(const std::string& codec, int dtype, int64_t part_numel, int64_t segment,
                           const std::string& bucket);

void write_frame(const Frame& frame, std::byte* out);

// Throws MismatchError naming the bucket, the peer, and what was expected and seen.
void check_frame(const std::byte* in, const Frame& expected, int peer, const std::string& bucket);

}  // namespace bagua
