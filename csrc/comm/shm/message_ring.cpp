#include "comm/shm/message_ring.h"

#include <algorithm>
#include <cstring>

#include "base/check.h"
#include "comm/tensor_checks.h"

namespace bagua {
namespace {

// Shown to the other rank at once, so that both copy at the same time.
constexpr uint64_t kPieceBytes = uint64_t{128} << 10;

constexpr uint64_t whole_lines(uint64_t bytes) {
  return (bytes + kLineBytes - 1) / kLineBytes * kLineBytes;
}

std::string text_of(uint64_t bytes, int32_t dtype) {
  const bool known = dtype >= 0 && dtype < static_cast<int32_t>(at::ScalarType::Undefined);
  return concat(bytes, " bytes ",
                known ? dtype_text(static_cast<at::ScalarType>(dtype)) : "of no dtype");
}

}  // namespace

RingWriter::RingWriter(RankState& mine, const RankState& theirs, std::byte* ring, size_t ring_bytes,
                       int me, int peer)
    : sent_shown_(&mine.channels[peer].sent),
      taken_shown_(&theirs.channels[me].taken),
      ring_(ring),
      capacity_(ring_bytes),
      peer_(peer) {}

uint64_t RingWriter::room() const {
  const uint64_t under_way = sent_ - taken_shown_->load(std::memory_order_acquire);
  BAGUA_CHECK(under_way <= capacity_, "rank ", peer_,
              " shows that it has taken more than was sent: its memory is damaged");
  return capacity_ - under_way;
}

// Copies, around the end of the ring.
void RingWriter::put(const std::byte* data, uint64_t bytes) {
  const uint64_t begin = sent_ % capacity_;
  const uint64_t first = std::min(bytes, capacity_ - begin);
  std::memcpy(ring_ + begin, data, first);
  std::memcpy(ring_, data + first, bytes - first);
  sent_ += bytes;
}

bool RingWriter::push(Moving& message) {
  uint64_t free = room();
  if (free == 0) return false;
  if (!message.has_header) {  // the reader shows whole lines: there is room for one
    const MessageHeader header{.number = ++messages_,
                               .bytes = message.bytes,
                               .dtype = static_cast<int32_t>(message.dtype)};
    put(reinterpret_cast<const std::byte*>(&header), sizeof header);
    message.has_header = true;
    free -= sizeof header;
  }
  const uint64_t count = std::min({free, message.bytes - message.done, kPieceBytes});
  put(message.data + message.done, count);
  message.done += count;
  if (message.is_done()) sent_ = whole_lines(sent_);
  sent_shown_->store(sent_, std::memory_order_release);
  return true;
}

RingReader::RingReader(RankState& mine, const RankState& theirs, const std::byte* ring,
                       size_t ring_bytes, int me, int peer)
    : taken_shown_(&mine.channels[peer].taken),
      sent_shown_(&theirs.channels[me].sent),
      ring_(ring),
      capacity_(ring_bytes),
      me_(me),
      peer_(peer) {}

uint64_t RingReader::available() const {
  const uint64_t there = sent_shown_->load(std::memory_order_acquire) - taken_;
  BAGUA_CHECK(there <= capacity_, "rank ", peer_,
              " shows that it has sent more than there is room for: its memory is damaged");
  return there;
}

void RingReader::get(std::byte* data, uint64_t bytes) {
  const uint64_t begin = taken_ % capacity_;
  const uint64_t first = std::min(bytes, capacity_ - begin);
  std::memcpy(data, ring_ + begin, first);
  std::memcpy(data + first, ring_, bytes - first);
  taken_ += bytes;
}

void RingReader::check_header(const Moving& message) {
  MessageHeader header{};
  get(reinterpret_cast<std::byte*>(&header), sizeof header);
  BAGUA_CHECK(header.number == ++messages_, "message ", messages_, " of rank ", peer_,
              " has the number ", header.number, ": its memory is damaged");
  if (header.bytes == message.bytes && header.dtype == static_cast<int32_t>(message.dtype)) return;
  throw MismatchError(concat(
      "ranks disagree: rank ", peer_, " sends ", text_of(header.bytes, header.dtype), " to rank ",
      me_, ", which expects ", text_of(message.bytes, static_cast<int32_t>(message.dtype))));
}

bool RingReader::pull(Moving& message) {
  uint64_t there = available();
  if (there == 0) return false;
  if (!message.has_header) {
    BAGUA_CHECK(there >= sizeof(MessageHeader), "rank ", peer_,
                " shows a part of a header: its memory is damaged");
    check_header(message);
    message.has_header = true;
    there -= sizeof(MessageHeader);
  }
  const uint64_t count = std::min({there, message.bytes - message.done, kPieceBytes});
  get(message.data + message.done, count);
  message.done += count;
  // The padding came with the last piece.
  if (message.is_done()) taken_ = whole_lines(taken_);
  taken_shown_->store(taken_ / kLineBytes * kLineBytes, std::memory_order_release);
  return true;
}

}  // namespace bagua
