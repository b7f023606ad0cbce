#include "comm/shm/shared_exchange.h"

#include <cstdint>

namespace bagua {
namespace {

template <typename Queue, typename Ring>
bool move_next(Queue& queue, Ring& ring, bool (Ring::*step)(Moving&)) {
  if (queue.next() == nullptr) return false;
  Moving& message = queue.messages[queue.done];
  if (!(ring.*step)(message)) return false;
  if (message.is_done()) ++queue.done;
  return true;
}

}  // namespace

SharedExchange::SharedExchange(const PeerWaits& waits, std::vector<RingWriter>& writers,
                               std::vector<RingReader>& readers, c10::ArrayRef<Send> sends,
                               c10::ArrayRef<Recv> recvs)
    : waits_(waits),
      writers_(writers),
      readers_(readers),
      outgoing_(waits.group().size),
      incoming_(waits.group().size) {
  for (const Send& send : sends) add(outgoing_, send.tensor, send.peer);
  for (const Recv& recv : recvs) expected_.push_back(add(incoming_, recv.tensor, recv.peer));
}

void SharedExchange::run(const OnReceived& on_received) {
  size_t called = 0;
  while (true) {
    bool moved = false;
    for (int peer = 0; peer < waits_.group().size; ++peer) moved |= move(peer);
    if (called < expected_.size() && received(called)) {
      on_received(called++);
      continue;
    }
    if (called == expected_.size() && next_awaited() == nullptr) return;
    if (!moved) wait();
  }
}

SharedExchange::Place SharedExchange::add(std::vector<Queue>& queues, const at::Tensor& tensor,
                                          int peer) {
  if (peer == waits_.group().rank || tensor.numel() == 0) return {kNowhere, 0};
  queues[peer].messages.push_back({.data = static_cast<std::byte*>(tensor.data_ptr()),
                                   .bytes = static_cast<uint64_t>(tensor.nbytes()),
                                   .dtype = tensor.scalar_type(),
                                   .peer = peer});
  return {peer, queues[peer].messages.size() - 1};
}

bool SharedExchange::received(size_t message) const {
  const auto [peer, index] = expected_[message];
  return peer == kNowhere || incoming_[peer].done > index;
}

bool SharedExchange::move(int peer) {
  const bool pushed = move_next(outgoing_[peer], writers_[peer], &RingWriter::push);
  const bool pulled = move_next(incoming_[peer], readers_[peer], &RingReader::pull);
  if (pushed || pulled) waits_.ring(peer);
  return pushed || pulled;
}

bool SharedExchange::can_move(int peer) const {
  return (outgoing_[peer].next() && writers_[peer].has_room()) ||
         (incoming_[peer].next() && readers_[peer].has_bytes());
}

const Moving* SharedExchange::next_awaited() const {
  for (int peer = 0; peer < waits_.group().size; ++peer) {
    if (const Moving* message = incoming_[peer].next()) return message;
    if (const Moving* message = outgoing_[peer].next()) return message;
  }
  return nullptr;
}

void SharedExchange::wait() const {
  const Moving& message = *next_awaited();
  const CallSite site{.call = "exchange",
                      .bytes = static_cast<int64_t>(message.bytes),
                      .dtype = message.dtype,
                      .peer = message.peer};
  const auto is_awaited = [&](int rank) { return awaits(rank); };
  const auto can_go_on = [&] {
    for (int peer = 0; peer < waits_.group().size; ++peer) {
      if (can_move(peer)) return true;
    }
    return false;
  };
  waits_.wait(site, can_go_on, is_awaited, is_awaited);
}

}  // namespace bagua
