#include "comm/shm/peer_waits.h"

namespace bagua {

PeerWaits::PeerWaits(Group group, const SharedGroup& shared, const Refusal& refusal,
                     std::chrono::milliseconds timeout)
    : group_(group),
      shared_(shared),
      refusal_(refusal),
      timeout_(timeout),
      spin_(Spin::for_ranks(group.size)) {}

void PeerWaits::fail(CallSite site, int peer, const std::string& what) const {
  site.peer = peer;
  throw TransportError(refusal_.failure_text(site, what));
}

void PeerWaits::ring_all() const noexcept {
  for (int rank = 0; rank < group_.size; ++rank) {
    if (rank != group_.rank) ring(rank);
  }
}

// Null: all is well.
const char* PeerWaits::why_gone(int rank) const {
  const Ended ended = shared_.state(rank).ended.load();
  if (ended == Ended::kLeft) return "the peer has left the group";
  if (ended != Ended::kNot) return kGaveUp;
  const auto& link = shared_.links[rank];
  return link && link->is_cut() ? "the peer's process has ended" : nullptr;
}

}  // namespace bagua
