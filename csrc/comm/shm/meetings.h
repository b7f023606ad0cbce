// Meetings of ranks that share memory, at which they compare what they have called.
#pragma once

#include <cstdint>

#include "comm/call_site.h"
#include "comm/communicator.h"
#include "comm/shm/peer_waits.h"
#include "comm/shm/shared_group.h"

namespace bagua {

enum class SharedCall : uint32_t { kAllReduce, kAllGather, kAllToAll, kBroadcast, kReduceInPlace };

// Thread safety: one thread. Ownership: borrows all. May fail: as PeerWaits, and MismatchError
// where ranks have called something else.
class Meetings final {
 public:
  Meetings(const PeerWaits& waits, const SharedGroup& shared);

  Group group() const { return waits_.group(); }

  // Shows the others what is called. `root`: of a broadcast, or the number of a bucket.
  void describe(const CallSite& site, SharedCall call, ReduceOp op = ReduceOp::kSum, int root = 0);

  // Returns when all ranks have come. What they wrote before is visible then. The first meeting of
  // a call compares it with the others'. A rank that comes when another one has given up to wait
  // for it fails too.
  void meet(const CallSite& site);

 private:
  void await_others(const CallSite& site);
  void compare_calls();
  RankState& mine() { return shared_.state(group().rank); }

  const PeerWaits& waits_;
  const SharedGroup& shared_;
  uint64_t calls_ = 0;
  bool calls_compared_ = true;  // the current call with the others'
  uint64_t meetings_ = 0;
};

}  // namespace bagua
