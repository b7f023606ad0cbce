// The 32 bytes in front of every compressed payload (docs/wire-format.md, "Frames").
#pragma once

#include <cstddef>
#include <cstdint>
#include <string>

#include "codec/frame_kernels.h"

namespace bagua {

inline constexpr int64_t kFrameBytes = sizeof(FrameWords);

// Whether frames carry a checksum of their payload; equal on all ranks.
enum class Checksum : uint8_t { kOff, kOn };

// Values that sender and receiver must agree on before a payload is decoded.
struct Frame {
  uint64_t fingerprint = 0;    // codec, dtype, sizes and bucket: see frame_fingerprint
  uint64_t round = 0;          // its number
  uint64_t payload_bytes = 0;  // bytes that follow
  Checksum checksum = Checksum::kOff;
};

uint64_t frame_fingerprint(const std::string& codec, int dtype, int64_t part_numel, int64_t segment,
                           const std::string& bucket);

// In front of its payload, which is in host memory and, with Checksum::kOn, complete.
void write_frame(const Frame& frame, std::byte* message);

// Throws MismatchError naming the bucket, the peer, and what was expected and seen. `message` is a
// frame and, with Checksum::kOn, its payload, both in host memory.
void check_frame(const std::byte* message, const Frame& expected, int peer,
                 const std::string& bucket);

// The same where the payload is elsewhere. `checksum`: its payload_checksum(); not looked at
// without Checksum::kOn.
FrameWords frame_words(const Frame& frame, uint64_t checksum);
void check_frame(const FrameWords& seen, const Frame& expected, uint64_t checksum, int peer,
                 const std::string& bucket);

// For describe(), behind what else is said.
inline const char* checksum_text(Checksum checksum) {
  return checksum == Checksum::kOn ? ", checksum" : "";
}

}  // namespace bagua
