// The bytes of the memory that the ranks of a group share.
//
// Each rank has memory that it alone writes: its state, two halves for collectives, and a ring of
// messages for each rank. One page more, with a bell for each rank, is written by all. What another
// rank writes is copied before it is compared and used: no number of its can lead outside.
#pragma once

#include <algorithm>
#include <atomic>
#include <cstddef>
#include <cstdint>

namespace bagua {

inline constexpr int kMostSharedRanks = 64;
inline constexpr size_t kLineBytes = 64;
inline constexpr size_t kPageBytes = 4096;
inline constexpr size_t kHalfBytes = size_t{512} << 10;

// Rung for a rank after something that it may wait for; see wait_for_ring().
struct alignas(kLineBytes) Bell {
  std::atomic<uint32_t> rings{0};
  std::atomic<uint32_t> sleeping{0};
};

// Why a rank takes part in no further call.
enum class Ended : uint32_t { kNot, kLeft, kGaveUp };

// Description of a collective, to be compared with the others'. kind: a SharedCall.
struct alignas(kLineBytes) CallRecord {
  uint64_t number;
  uint64_t bytes;
  uint32_t kind;
  int32_t dtype;
  int32_t op;
  int32_t root;

  bool operator==(const CallRecord&) const = default;
};

// Bytes so far of messages to another rank, and of messages from it.
struct Channel {
  alignas(kLineBytes) std::atomic<uint64_t> sent{0};
  alignas(kLineBytes) std::atomic<uint64_t> taken{0};
};

struct RankState {
  // Random words, the second of which is written once all have mapped the memory.
  std::atomic<uint64_t> word{0};
  std::atomic<uint64_t> live_word{0};
  alignas(kLineBytes) std::atomic<uint64_t> meetings{0};  // to which the rank has come
  std::atomic<uint64_t> failed_meeting{0};                // in which it has given up; 0: none
  std::atomic<Ended> ended{Ended::kNot};
  CallRecord calls[2];  // by parity of their number
  Channel channels[kMostSharedRanks];
};

static_assert(std::atomic<uint64_t>::is_always_lock_free);
static_assert(std::atomic<uint32_t>::is_always_lock_free);

constexpr size_t whole_pages(size_t bytes) {
  return (bytes + kPageBytes - 1) / kPageBytes * kPageBytes;
}

// Bytes of the ring between two of `size` ranks: all rings of a rank have about a megabyte, so that
// a segment of a compressed bucket fits between two ranks.
constexpr size_t ring_bytes(int size) {
  const size_t share = (size_t{1} << 20) / static_cast<size_t>(std::max(1, size - 1));
  return std::max(whole_pages(share), size_t{64} << 10);
}

inline constexpr size_t kHalvesOffset = whole_pages(sizeof(RankState));

constexpr size_t ring_offset(int size, int peer) {
  return kHalvesOffset + 2 * kHalfBytes + ring_bytes(size) * static_cast<size_t>(peer);
}

constexpr size_t rank_memory_bytes(int size) { return ring_offset(size, size); }

constexpr size_t bells_bytes(int size) {
  return whole_pages(sizeof(Bell) * static_cast<size_t>(size));
}

}  // namespace bagua
