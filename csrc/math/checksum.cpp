#include "math/checksum.h"

#include <cstring>

#include "base/per_instruction_set.h"

namespace bagua {

// A product of 32 by 32 bits is one instruction for a whole vector: faster than memory.
BAGUA_PER_INSTRUCTION_SET
uint64_t payload_checksum(const std::byte* payload, int64_t bytes) {
  auto sum = static_cast<uint64_t>(bytes);
  for (int64_t i = 0; i < bytes / 4; ++i) {
    uint32_t word;
    std::memcpy(&word, payload + 4 * i, sizeof word);
    sum += uint64_t{word} * (static_cast<uint32_t>(i) * kChecksumStep + 1);
  }
  return sum;
}

}  // namespace bagua
