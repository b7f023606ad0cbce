// Matching in the fake NCCL: operations of different ranks that belong together are done.
#pragma once

#include <algorithm>
#include <chrono>
#include <cstring>
#include <map>
#include <memory>
#include <mutex>
#include <string>
#include <utility>
#include <vector>

#include "fake_nccl/reduce.h"
#include "fake_nccl/streams.h"
#include "fake_nccl/world.h"

namespace fake_nccl {

// The functions below expect the mutex to be held.

// The operations that a rank is in, or null.
inline Group* front(ncclComm* comm, Place place) {
  if (!comm) return nullptr;
  if (place == Place::kDevice) return comm->runs ? &comm->kernels.front().second : nullptr;
  return comm->on_host.empty() ? nullptr : &comm->on_host.front();
}

inline void end(ncclComm* comm, Place place) {
  if (place == Place::kDevice) return end_kernel(comm);
  comm->on_host.pop_front();
}

inline void split(const Clique& parent) {
  std::map<int, std::vector<std::pair<int, int>>> by_color;  // color -> (key, rank)
  for (ncclComm* comm : parent.ranks) {
    const Operation& operation = comm->on_host[0][0];
    if (operation.peer != NCCL_SPLIT_NOCOLOR) {
      by_color[operation.peer].push_back({operation.key, comm->rank});
    }
  }
  for (auto& [color, members] : by_color) {
    std::sort(members.begin(), members.end());
    auto clique = std::make_shared<Clique>(static_cast<int>(members.size()));
    for (size_t i = 0; i < members.size(); ++i) {
      ncclComm* const rank = parent.ranks[members[i].second];
      ncclComm* const child = make(clique, static_cast<int>(i));
      child->device = rank->device;
      rank->unborn.push_back({rank->on_host[0][0].child, child});
    }
  }
}

// Writes the pointers of children, the second time that their parent is seen at rest.
inline void deliver(ncclComm* parent) {
  std::erase_if(parent->unborn, [](ncclComm::Unborn& it) {
    if (it.looks_left-- > 0) return false;
    std::atomic_ref(*it.place).store(it.child);
    return true;
  });
}

inline void perform(Clique& clique, Place place) {
  std::vector<Operation*> all;
  for (ncclComm* comm : clique.ranks) all.push_back(&front(comm, place)->front());
  const Operation& first = *all[0];
  const size_t bytes = first.count * size_of(first.type);
  switch (first.kind) {
    case Kind::kAllReduce: {
      std::vector<const void*> inputs;
      for (const Operation* operation : all) inputs.push_back(operation->from);
      const auto result = reduce(inputs, first.count, first.type, first.reduce);
      for (const Operation* operation : all) std::memcpy(operation->to, result.data(), bytes);
      break;
    }
    case Kind::kAllGather:
      for (const Operation* target : all) {
        for (size_t i = 0; i < all.size(); ++i) {
          std::memmove(static_cast<char*>(target->to) + i * bytes, all[i]->from, bytes);
        }
      }
      break;
    case Kind::kBroadcast:
      for (const Operation* target : all) std::memmove(target->to, all[first.peer]->from, bytes);
      break;
    case Kind::kSplit:
      split(clique);
      break;
    case Kind::kSend:
    case Kind::kRecv:
      break;
  }
}

// A collective is done when all ranks are in it.
inline bool progress_collective(Clique& clique, Place place) {
  for (ncclComm* comm : clique.ranks) {
    const Group* group = front(comm, place);
    if (!group || stalled(comm) || (*group)[0].is_message()) return false;
  }
  const Operation& first = front(clique.ranks[0], place)->front();
  for (ncclComm* comm : clique.ranks) {
    if (first.agrees(front(comm, place)->front())) continue;
    fail(clique, ncclInvalidUsage, "ranks disagree about a collective");
    return false;
  }
  perform(clique, place);
  for (ncclComm* comm : clique.ranks) end(comm, place);
  return true;
}

// The i-th send of a group to a peer goes to the peer's i-th receive from this rank.
inline bool progress_messages(Clique& clique, ncclComm* sender, Place place) {
  Group* sends = front(sender, place);
  if (!sends || stalled(sender)) return false;
  bool moved = false;
  for (Operation& send : *sends) {
    if (send.kind != Kind::kSend || send.done) continue;
    ncclComm* receiver = clique.ranks[send.peer];
    Group* recvs = front(receiver, place);
    if (!recvs || stalled(receiver)) continue;
    const auto recv = std::find_if(recvs->begin(), recvs->end(), [&](const Operation& other) {
      return other.kind == Kind::kRecv && !other.done && other.peer == sender->rank;
    });
    if (!(*recvs)[0].is_message() || (recv != recvs->end() && recv->count != send.count)) {
      fail(clique, ncclInvalidUsage, "ranks disagree about a message");
      return false;
    }
    if (recv == recvs->end()) continue;
    std::memmove(recv->to, send.from, send.count * size_of(send.type));
    moved = send.done = recv->done = true;
  }
  return moved;
}

inline bool progress(Clique& clique, Place place) {
  if (!clique.complete()) return false;
  bool any = false;
  for (bool moved = true; moved; any |= moved) {
    moved = progress_collective(clique, place);
    for (ncclComm* comm : clique.ranks) moved |= progress_messages(clique, comm, place);
    for (ncclComm* comm : clique.ranks) {
      const Group* group = front(comm, place);
      const auto done = [](const Operation& operation) { return operation.done; };
      if (group && std::all_of(group->begin(), group->end(), done)) end(comm, place);
    }
  }
  return any;
}

// Lets all devices run as far as they come by themselves.
inline void run_devices() {
  for (bool moved = true; moved;) {
    moved = false;
    for (auto& [handle, stream] : streams) moved |= advance(handle, stream);
    const auto running = occupants;
    for (const auto& [device, comm] : running) moved |= progress(*comm->clique, Place::kDevice);
  }
  changed.notify_all();
}

inline ncclResult_t state_of(ncclComm* comm) {
  if (comm->error != ncclSuccess) return comm->error;
  if (!comm->clique->complete() || faults.never_connects || !comm->on_host.empty()) {
    return ncclInProgress;
  }
  const bool finalizes = comm->life == ncclComm::kFinalized;
  if (finalizes && (faults.never_quiet || !comm->kernels.empty())) return ncclInProgress;
  return comm->polls_left-- > 0 ? ncclInProgress : ncclSuccess;
}

inline ncclResult_t issue(ncclComm* comm, Group group, cudaStream_t stream) {
  if (comm->error != ncclSuccess) return comm->error;
  if (!comm->on_host.empty() || comm->polls_left > 0) {
    misuse.push_back("a call while the one before, or the connecting, is in progress");
  }
  if (comm->life != ncclComm::kAlive) return ncclInvalidUsage;
  comm->polls_left = faults.polls;
  if (comm->rank == faults.failing_rank && comm->calls++ >= faults.calls_until_failure) {
    last_error = "a fault that was asked for";
    comm->error = faults.failure;
    return ncclInProgress;
  }
  if (stream) {
    comm->kernels.emplace_back(stream, std::move(group));
    give(stream, {comm, nullptr, nullptr});
    run_devices();
  } else {
    comm->on_host.push_back(std::move(group));
    progress(*comm->clique, Place::kHost);
  }
  return ncclInProgress;
}

// Returns when no kernel of `comm` is left, as the real one, which waits for its stream. What waits
// for longer than this is noted, and its kernels are taken away.
inline void abort(ncclComm* comm, std::unique_lock<std::mutex>& lock) {
  constexpr std::chrono::seconds kLongest{4};
  comm->life = ncclComm::kAborted;
  comm->on_host.clear();
  for (const ncclComm::Unborn& it : comm->unborn) {
    it.child->life = ncclComm::kAborted;
    --alive;
  }
  comm->unborn.clear();
  run_devices();
  if (changed.wait_for(lock, kLongest, [&] { return comm->kernels.empty(); })) return;
  misuse.push_back("ncclCommAbort waits for a kernel of another communicator");
  for (auto& [handle, stream] : streams) {
    std::erase_if(stream.kernels, [&](const Kernel& kernel) { return kernel.comm == comm; });
  }
  comm->kernels.clear();
  if (std::exchange(comm->runs, false)) {
    std::erase_if(occupants, [&](const auto& place) { return place.second == comm; });
  }
  run_devices();
}

}  // namespace fake_nccl
