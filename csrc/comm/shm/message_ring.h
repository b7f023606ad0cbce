// One direction between two ranks: messages through a ring in the sender's memory.
#pragma once

#include <cstddef>
#include <cstdint>

#include <c10/core/ScalarType.h>

#include "comm/shm/layout.h"

namespace bagua {

// In front of each message, which both begin at a multiple of a line.
struct alignas(kLineBytes) MessageHeader {
  uint64_t number;  // of the message from this sender to this receiver
  uint64_t bytes;
  int32_t dtype;
};

// A message, or the place for one, and how much of it has been moved.
struct Moving {
  std::byte* data;
  uint64_t bytes;
  at::ScalarType dtype;
  int peer;
  uint64_t done = 0;
  bool has_header = false;

  bool is_done() const { return has_header && done == bytes; }
};

// Thread safety: one thread. Ownership: borrows the shared memory. May fail: Error where the other
// rank's counters cannot be.
class RingWriter final {
 public:
  // `mine` is this rank's state, `theirs` the receiver's.
  RingWriter(RankState& mine, const RankState& theirs, std::byte* ring, size_t ring_bytes, int me,
             int peer);

  // Whether a part of a message that is not done can be written.
  bool has_room() const { return room() > 0; }

  // Writes as much as there is room for, at most a piece; false if there is none.
  bool push(Moving& message);

 private:
  uint64_t room() const;
  void put(const std::byte* data, uint64_t bytes);

  std::atomic<uint64_t>* const sent_shown_;
  const std::atomic<uint64_t>* const taken_shown_;
  std::byte* const ring_;
  const uint64_t capacity_;
  const int peer_;
  uint64_t sent_ = 0;
  uint64_t messages_ = 0;
};

// May fail: as RingWriter, and MismatchError where the sender's message is not the expected one.
class RingReader final {
 public:
  RingReader(RankState& mine, const RankState& theirs, const std::byte* ring, size_t ring_bytes,
             int me, int peer);

  bool has_bytes() const { return available() > 0; }

  // Reads what is there, at most a piece; false if there is nothing.
  bool pull(Moving& message);

 private:
  uint64_t available() const;
  void check_header(const Moving& message);
  void get(std::byte* data, uint64_t bytes);

  std::atomic<uint64_t>* const taken_shown_;
  const std::atomic<uint64_t>* const sent_shown_;
  const std::byte* const ring_;
  const uint64_t capacity_;
  const int me_;
  const int peer_;
  uint64_t taken_ = 0;
  uint64_t messages_ = 0;
};

}  // namespace bagua
