// A ring of messages in shared memory, where the other rank writes what it likes.
#pragma once

#include <c10/core/ScalarType.h>

#include "base/check.h"
#include "comm/shm/message_ring.h"
#include "target.h"

namespace bagua::fuzz {

constexpr size_t kRingBytes = 1024;

// Whatever the other rank's counters and its ring hold, a message is refused or read into its
// place, and one that is sent stays inside the ring.
inline void shared_ring(Input input) {
  RankState mine, theirs;
  const auto ring = exactly<std::byte>(kRingBytes);
  const auto bytes = static_cast<uint64_t>(input.up_to(3 * kRingBytes));
  const auto memory = exactly<std::byte>(bytes);
  const bool reads = input.take<uint8_t>() % 2 == 0;
  Moving message{.data = memory.get(), .bytes = bytes, .dtype = at::kByte, .peer = 1};
  RingReader reader(mine, theirs, ring.get(), kRingBytes, 0, 1);
  RingWriter writer(mine, theirs, ring.get(), kRingBytes, 0, 1);
  try {
    for (int step = 0; step < 8 && !message.is_done(); ++step) {
      const auto number = input.take<uint8_t>() % 4 == 0
                              ? input.take<uint64_t>()
                              : static_cast<uint64_t>(input.up_to(4 * kRingBytes));
      if (reads) {
        input.take_into(ring.get(), kRingBytes);
        theirs.channels[0].sent.store(number);
        reader.pull(message);
      } else {
        theirs.channels[0].taken.store(number);
        writer.push(message);
      }
      FUZZ_REQUIRE(message.done <= message.bytes);
    }
  } catch (const Error&) {
    FUZZ_REQUIRE(message.done <= message.bytes);
  }
}

inline std::vector<Bytes> shared_rings() {
  std::vector<Bytes> result;
  for (const int64_t bytes : {0, 1, 100, 900, 1500, 3000}) {
    Example sent;
    sent.up_to(bytes).put(uint8_t{0});
    for (uint64_t shown = 512; shown <= 2048; shown += 512) {
      const MessageHeader header{.number = 1,
                                 .bytes = static_cast<uint64_t>(bytes),
                                 .dtype = static_cast<int32_t>(at::kByte)};
      std::byte ring[kRingBytes] = {};
      std::memcpy(ring, &header, sizeof header);
      sent.put(uint8_t{1}).up_to(static_cast<int64_t>(shown)).put_from(ring, sizeof ring);
    }
    result.push_back(sent);
    Example taken;
    taken.up_to(bytes).put(uint8_t{1});
    for (int64_t seen = 0; seen < 4; ++seen) taken.put(uint8_t{1}).up_to(512 * seen);
    result.push_back(taken);
  }
  return result;
}

}  // namespace bagua::fuzz
