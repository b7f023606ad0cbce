// How the ranks of a new NCCL communicator find each other: through a store.
#pragma once

#include <optional>
#include <string>

#include <torch/csrc/distributed/c10d/Store.hpp>

#include "comm/communicator.h"
#include "comm/nccl/nccl_handle.h"

namespace bagua {

// The ranks' meeting in a store that is theirs alone (a prefix). Keys: "id", what rank 0 made;
// "here/<rank>", who has come; "failed", the first rank that could not connect, and why.
//
// Thread safety: none needed, it lives during one constructor. Ownership: shares the store. What
// the store throws becomes Error, or TimeoutError past the deadline, and names the rank.
class NcclRendezvous final {
 public:
  NcclRendezvous(c10::intrusive_ptr<c10d::Store> store, Group group,
                 NcclHandle::Clock::time_point deadline);

  // Rank 0 makes the id and hands it over, the others wait for it; the id, on all ranks.
  ncclUniqueId hand_over(const NcclLibrary& library);

  // Tells the others that this rank will not come. The first failure of the group stays.
  void give_up(const std::string& reason) noexcept;
  // The failure of another rank, if there is one.
  std::optional<std::string> given_up() noexcept;
  // "rank 1, 3 of 4 have not come", or what to look at when all have.
  std::string missing() noexcept;

 private:
  ncclUniqueId make(const NcclLibrary& library);
  ncclUniqueId wait_for_id();

  const c10::intrusive_ptr<c10d::Store> store_;
  const Group group_;
  const NcclHandle::Clock::time_point deadline_;
};

}  // namespace bagua
