// Waiting for other ranks, and why a wait ends without them.
#pragma once

#include <algorithm>
#include <chrono>
#include <string>

#include "base/check.h"
#include "comm/call_site.h"
#include "comm/communicator.h"
#include "comm/refusal.h"
#include "comm/shm/shared_group.h"
#include "comm/shm/waiting.h"

namespace bagua {

inline constexpr const char* kGaveUp = "the peer gave up a call";

// Thread safety: wait() from one thread, the others from any. Ownership: borrows all.
class PeerWaits final {
 public:
  PeerWaits(Group group, const SharedGroup& shared, const Refusal& refusal,
            std::chrono::milliseconds timeout);

  Group group() const { return group_; }

  // 1. Returns once `can_go_on()`, which other ranks' memory decides.
  // 2. Else ends with a reason: an abort here; a rank for which `is_involved(rank)` that has ended
  //    its part, those for which `is_missing(rank)` first; the deadline. What a rank has written
  //    before it ended is looked at once more.
  template <typename CanGoOn, typename IsMissing, typename IsInvolved>
  void wait(CallSite site, CanGoOn can_go_on, IsMissing is_missing, IsInvolved is_involved) const;

  // Throws TransportError, naming the peer.
  [[noreturn]] void fail(CallSite site, int peer, const std::string& what) const;

  // Wakes a rank after something that it may wait for has been written.
  void ring(int rank) const noexcept { bagua::ring(shared_.bell(rank)); }
  void ring_all() const noexcept;

 private:
  // Between two looks at whether the processes of the awaited ranks live.
  static constexpr std::chrono::milliseconds kBetweenLivenessChecks{50};

  const char* why_gone(int rank) const;
  template <typename Has>
  int first_other_rank(Has has) const;

  const Group group_;
  const SharedGroup& shared_;
  const Refusal& refusal_;
  const std::chrono::milliseconds timeout_;
  const Spin spin_;
};

// -1: none.
template <typename Has>
int PeerWaits::first_other_rank(Has has) const {
  int rank = 0;
  while (rank < group_.size && (rank == group_.rank || !has(rank))) ++rank;
  return rank == group_.size ? -1 : rank;
}

template <typename CanGoOn, typename IsMissing, typename IsInvolved>
void PeerWaits::wait(CallSite site, CanGoOn can_go_on, IsMissing is_missing,
                     IsInvolved is_involved) const {
  using std::chrono::steady_clock;
  const auto has_ended = [&](int rank) {
    return is_involved(rank) && shared_.state(rank).ended.load() != Ended::kNot;
  };
  const auto over = [&] {
    return can_go_on() || refusal_.is_set() || first_other_rank(has_ended) >= 0;
  };
  const auto deadline = steady_clock::now() + timeout_;
  auto next_look = steady_clock::now() + kBetweenLivenessChecks;
  for (Spin spin = spin_; !can_go_on(); spin = {.looks = 1, .yields = 0}) {
    const std::chrono::nanoseconds left = std::min(deadline, next_look) - steady_clock::now();
    wait_for_ring(shared_.bell(group_.rank), spin, left, over);
    if (can_go_on()) return;
    if (refusal_.is_set()) fail(site, site.peer, refusal_.reason());
    const auto now = steady_clock::now();
    if (now < std::min(deadline, next_look) && first_other_rank(has_ended) < 0) continue;
    next_look = now + kBetweenLivenessChecks;
    const auto is_gone = [&](int rank) { return is_involved(rank) && why_gone(rank); };
    int gone = first_other_rank([&](int rank) { return is_missing(rank) && is_gone(rank); });
    if (gone < 0) gone = first_other_rank(is_gone);
    const char* const why = gone < 0 ? nullptr : why_gone(gone);
    if (can_go_on()) return;
    if (why != nullptr) fail(site, gone, why);
    if (now < deadline) continue;
    site.peer = first_other_rank(is_missing);
    throw TimeoutError(refusal_.failure_text(
        site, concat("Timed out waiting ", timeout_.count(), "ms for the peer")));
  }
}

}  // namespace bagua
