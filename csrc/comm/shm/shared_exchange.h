// The messages of one call between ranks that share memory.
#pragma once

#include <cstddef>
#include <vector>

#include "comm/communicator.h"
#include "comm/shm/message_ring.h"
#include "comm/shm/peer_waits.h"

namespace bagua {

// Thread safety: one thread. Ownership: borrows all. May fail: as PeerWaits and the rings, and as
// the callback.
class SharedExchange final {
 public:
  // The rings are by rank.
  SharedExchange(const PeerWaits& waits, std::vector<RingWriter>& writers,
                 std::vector<RingReader>& readers, c10::ArrayRef<Send> sends,
                 c10::ArrayRef<Recv> recvs);

  // Moves what can be moved, and waits where nothing can, until all is done. `on_received` may take
  // long: what others wait for is sent first.
  void run(const OnReceived& on_received);

 private:
  struct Queue {
    std::vector<Moving> messages;
    size_t done = 0;

    const Moving* next() const { return done < messages.size() ? &messages[done] : nullptr; }
  };
  // Place of a message among those of its rank; kNowhere: it is not sent.
  struct Place {
    int peer;
    size_t index;
  };
  static constexpr int kNowhere = -1;

  Place add(std::vector<Queue>& queues, const at::Tensor& tensor, int peer);
  bool received(size_t message) const;
  bool move(int peer);
  bool awaits(int peer) const { return outgoing_[peer].next() || incoming_[peer].next(); }
  bool can_move(int peer) const;
  const Moving* next_awaited() const;
  void wait() const;

  const PeerWaits& waits_;
  std::vector<RingWriter>& writers_;
  std::vector<RingReader>& readers_;
  std::vector<Queue> outgoing_;  // by rank
  std::vector<Queue> incoming_;  // by rank
  std::vector<Place> expected_;  // by receive
};

}  // namespace bagua
