#include "op/wire/frame.h"

#include <array>
#include <cstring>

#include "base/check.h"
#include "math/checksum.h"

namespace bagua {
namespace {

constexpr uint64_t kMagic = 0x31656D6172664742;              // "BGframe1" in little endian
constexpr uint64_t kMagicWithChecksum = 0x316B636568634742;  // "BGcheck1"

constexpr size_t kWordsOfPlan = 3;  // the last one is about the payload

uint64_t mix(uint64_t hash, const void* data, size_t size) {
  const auto* bytes = static_cast<const unsigned char*>(data);
  for (size_t i = 0; i < size; ++i) hash = (hash ^ bytes[i]) * 0x100000001b3;  // FNV-1a
  return hash;
}

// Checksum of the payload behind the frame; 0 where none is compared.
uint64_t checksum_behind(const Frame& frame, const std::byte* message) {
  if (frame.checksum == Checksum::kOff) return 0;
  return payload_checksum(message + kFrameBytes, static_cast<int64_t>(frame.payload_bytes));
}

// The first `count` words.
void check_words(const FrameWords& seen, const FrameWords& wanted, size_t count, int peer,
                 const std::string& bucket) {
  const char* names[] = {"magic", "fingerprint of codec, dtype and sizes", "round",
                         "payload bytes"};
  for (size_t i = 0; i < count; ++i) {
    if (seen[i] == wanted[i]) continue;
    throw MismatchError(concat("bucket '", bucket, "': the payload from rank ", peer,
                               " does not match: ", names[i], " is ", seen[i], ", expected ",
                               wanted[i],
                               ". Ranks run different algorithms, codecs or library versions, or "
                               "the payload was corrupted on the wire; make them equal and "
                               "restart."));
  }
}

}  // namespace

uint64_t frame_fingerprint(const std::string& codec, int dtype, int64_t part_numel, int64_t segment,
                           const std::string& bucket) {
  uint64_t hash = mix(0xcbf29ce484222325, codec.data(), codec.size());
  hash = mix(hash, &dtype, sizeof dtype);
  hash = mix(hash, &part_numel, sizeof part_numel);
  hash = mix(hash, &segment, sizeof segment);
  return mix(hash, bucket.data(), bucket.size());
}

FrameWords frame_words(const Frame& frame, uint64_t checksum) {
  if (frame.checksum == Checksum::kOn) {
    return {kMagicWithChecksum, frame.fingerprint, frame.round, checksum};
  }
  return {kMagic, frame.fingerprint, frame.round, frame.payload_bytes};
}

void write_frame(const Frame& frame, std::byte* message) {
  const FrameWords words = frame_words(frame, checksum_behind(frame, message));
  std::memcpy(message, words.data(), sizeof words);
}

void check_frame(const std::byte* message, const Frame& expected, int peer,
                 const std::string& bucket) {
  FrameWords seen;
  std::memcpy(seen.data(), message, sizeof seen);
  check_frame(seen, expected, checksum_behind(expected, message), peer, bucket);
}

void check_frame(const FrameWords& seen, const Frame& expected, uint64_t checksum, int peer,
                 const std::string& bucket) {
  const FrameWords wanted = frame_words(expected, checksum);
  if (expected.checksum == Checksum::kOff) {
    return check_words(seen, wanted, wanted.size(), peer, bucket);
  }
  check_words(seen, wanted, kWordsOfPlan, peer, bucket);
  if (seen.back() == checksum) return;
  throw MismatchError(
      concat("bucket '", bucket, "', round ", expected.round, ": the payload from rank ", peer,
             " was corrupted on the way: the checksum of its ", expected.payload_bytes,
             " bytes is ", checksum, ", expected ", seen.back(),
             ". Restart from the last checkpoint; if it happens again, look for "
             "the machine or the network device that changes data."));
}

}  // namespace bagua
