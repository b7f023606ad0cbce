#include "op/frame.h"

#include <cstring>

#include "base/check.h"

namespace bagua {
namespace {

constexpr uint64_t kMagic = 0x31656D6172664742;  // "BGframe1" in little endian

uint64_t mix(uint64_t hash, const void* data, size_t size) {
  const auto* bytes = static_cast<const unsigned char*>(data);
  for (size_t i = 0; i < size; ++i) hash = (hash ^ bytes[i]) * 0x100000001b3;  // FNV-1a
  return hash;
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

void write_frame(const Frame& frame, std::byte* out) {
  const uint64_t words[4] = {kMagic, frame.fingerprint, frame.step, frame.payload_bytes};
  static_assert(sizeof words == kFrameBytes);
  std::memcpy(out, words, sizeof words);
}

void check_frame(const std::byte* in, const Frame& expected, int peer, const std::string& bucket) {
  uint64_t words[4];
  std::memcpy(words, in, sizeof words);
  const uint64_t wanted[4] = {kMagic, expected.fingerprint, expected.step, expected.payload_bytes};
  const char* names[4] = {"magic", "fingerprint of codec, dtype and sizes", "round",
                          "payload bytes"};
  for (int i = 0; i < 4; ++i) {
    if (words[i] == wanted[i]) continue;
    throw MismatchError(concat("bucket '", bucket, "': the payload from rank ", peer,
                               " does not match: ", names[i], " is ", words[i], ", expected ",
                               wanted[i],
                               ". Ranks run different algorithms, codecs or library versions, or "
                               "the payload was corrupted on the wire; make them equal and "
                               "restart."));
  }
}

}  // namespace bagua
