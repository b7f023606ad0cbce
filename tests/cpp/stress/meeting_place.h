// Where the ranks of a schedule meet.
#pragma once

#include <chrono>
#include <memory>
#include <utility>
#include <vector>

#include "comm/shm/shared_memory_communicator.h"
#include "comm/thread_communicator.h"

namespace bagua::stress {

// A hub of threads, or memory as the ranks of a host share it: mapped once, so that the sanitizers
// see both sides of it.
class MeetingPlace {
 public:
  enum class Kind { kHub, kSharedMemory };

  MeetingPlace(Kind kind, int ranks, std::chrono::milliseconds timeout)
      : ranks_(ranks), timeout_(timeout) {
    if (kind == Kind::kHub) {
      hub_ = std::make_shared<ThreadHub>(ranks, timeout);
      return;
    }
    bells_ = make_bells(ranks);
    for (int rank = 0; rank < ranks; ++rank) memory_.push_back(make_rank_memory(ranks));
  }

  std::unique_ptr<Communicator> connect(int rank) const {
    if (hub_) return std::make_unique<ThreadCommunicator>(hub_, rank);
    SharedGroup shared{.bells = bells_, .memory = memory_, .links = {}};
    shared.links.resize(ranks_);
    return std::make_unique<SharedMemoryCommunicator>(Group{rank, ranks_}, std::move(shared),
                                                      timeout_);
  }

 private:
  const int ranks_;
  const std::chrono::milliseconds timeout_;
  std::shared_ptr<ThreadHub> hub_;
  std::shared_ptr<SharedMemory> bells_;
  std::vector<std::shared_ptr<SharedMemory>> memory_;
};

}  // namespace bagua::stress
