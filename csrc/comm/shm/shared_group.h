// The memory that the ranks of a group share, and how they come to it.
#pragma once

#include <chrono>
#include <cstdint>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "comm/communicator.h"
#include "comm/gathering.h"
#include "comm/shm/layout.h"
#include "comm/shm/peer_link.h"
#include "comm/shm/shared_memory.h"

namespace bagua {

// Ownership: shared by nobody; a rank's own entry of `memory` can be written, and `bells`.
struct SharedGroup {
  std::shared_ptr<SharedMemory> bells;
  std::vector<std::shared_ptr<SharedMemory>> memory;  // by rank
  std::vector<std::unique_ptr<PeerLink>> links;       // by rank; null: this rank

  RankState& state(int rank) const;
  Bell& bell(int rank) const;
};

// Memory of one rank of `size`, and the bells of all, as they are before the first call.
std::shared_ptr<SharedMemory> make_rank_memory(int size);
std::shared_ptr<SharedMemory> make_bells(int size);

// Result of share_memory(): the memory, or why there is none. Equal on all ranks.
struct SharingOutcome {
  std::optional<SharedGroup> shared;
  std::string reason;
  bool on_one_node = true;  // for the launcher, as far as ranks have been looked at
};

// A rank's place, and its consent, for share_memory().
struct SharingOffer {
  int64_t node;         // of the launcher: ranks of different nodes share nothing
  std::string refusal;  // why this rank does not want to, or empty
};

// Called by all ranks of a group.
//
// 1. Each brings to the meeting where it is: boot, network namespace, node, process, and the random
// name of a
//    socket. If one refuses, or they differ, that is the outcome.
// 2. Each connects to those below it. Both ends compare user and process of the other one, as the
//    kernel says them, with what was published, and hand over their memory.
// 3. A random word of the store is found in the memory, and another one that is written later.
// 4. The ranks agree whether that has worked for all.
//
// Throws TimeoutError or Error if a rank does not come or the store does not answer.
SharingOutcome share_memory(Gathering& meeting, const SharingOffer& offer);

}  // namespace bagua
