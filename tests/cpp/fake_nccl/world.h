// Who meets whom in the fake NCCL: communicators, the operations they wait in, and their matching.
#pragma once

#include <algorithm>
#include <atomic>
#include <cstring>
#include <deque>
#include <map>
#include <memory>
#include <mutex>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include <nccl.h>
#include <pthread.h>

#include "fake_nccl/reduce.h"

namespace fake_nccl {

enum class Kind { kAllReduce, kAllGather, kBroadcast, kSend, kRecv, kSplit };

struct Operation {
  Kind kind;
  const void* from = nullptr;
  void* to = nullptr;
  size_t count = 0;
  ncclDataType_t type = ncclInt8;
  ncclRedOp_t reduce = ncclSum;
  int peer = -1;  // or root, or color
  int key = 0;
  ncclComm_t* child = nullptr;
  bool done = false;

  bool is_message() const { return kind == Kind::kSend || kind == Kind::kRecv; }
  // What all ranks of a collective must say alike.
  bool agrees(const Operation& other) const {
    if (kind == Kind::kSplit) return other.kind == kind;
    return kind == other.kind && count == other.count && type == other.type &&
           reduce == other.reduce && peer == other.peer;
  }
};

using Group = std::vector<Operation>;

struct Clique {
  explicit Clique(int size) : ranks(size, nullptr) {}
  std::vector<ncclComm*> ranks;
  bool complete() const { return std::count(ranks.begin(), ranks.end(), nullptr) == 0; }
};

struct Faults {
  int version = NCCL_VERSION_CODE;
  int polls = 0;          // how often each call is in progress
  int stalled_rank = -1;  // its operations never start
  int failing_rank = -1;
  int calls_until_failure = 0;
  ncclResult_t failure = ncclRemoteError;
  bool never_connects = false;
  bool never_quiet = false;
  bool makes_no_id = false;
};

// Not destroyed: a process may end with threads that still ask.
inline std::mutex mutex;  // of everything below
// A child that is forked while another thread holds it could ask nothing.
inline const int free_in_children =
    pthread_atfork([] { mutex.lock(); }, [] { mutex.unlock(); }, [] { mutex.unlock(); });
inline Faults faults;
inline std::map<std::string, std::shared_ptr<Clique>>& cliques =
    *new std::map<std::string, std::shared_ptr<Clique>>;
inline std::vector<std::string>& misuse = *new std::vector<std::string>;
inline std::map<std::string, int>& counts = *new std::map<std::string, int>;
inline std::string& last_error = *new std::string;
inline cudaStream_t last_stream = nullptr;
inline int ids = 0;
inline auto& all = *new std::vector<ncclComm*>;  // never freed: late calls are to be found
inline int alive = 0;

inline thread_local int group_depth = 0;
inline thread_local std::vector<std::pair<ncclComm_t, Operation>> collected;

}  // namespace fake_nccl

struct ncclComm {
  std::shared_ptr<fake_nccl::Clique> clique;
  int rank = 0;
  std::deque<fake_nccl::Group> issued;
  int polls_left = 0;
  int calls = 0;
  ncclResult_t error = ncclSuccess;
  enum { kAlive, kFinalized, kDestroyed, kAborted } life = kAlive;
  std::atomic<bool> inside{false};
};

namespace fake_nccl {

// Notes a second thread in the same communicator, and calls after its end.
class Visit {
 public:
  Visit(const char* name, ncclComm* comm) : comm_(comm) {
    if (comm_->inside.exchange(true)) note(name, "two threads in one communicator");
    std::this_thread::yield();  // gives the other thread its chance
    std::lock_guard lock(mutex);
    ++counts[name];
    if (comm_->life >= ncclComm::kDestroyed) misuse.push_back(std::string(name) + " after the end");
  }
  ~Visit() { comm_->inside = false; }

 private:
  static void note(const char* name, const char* what) {
    std::lock_guard lock(mutex);
    misuse.push_back(std::string(name) + ": " + what);
  }
  ncclComm* comm_;
};

// The functions below expect the mutex to be held.

inline void fail(Clique& clique, ncclResult_t result, const std::string& what) {
  last_error = what;
  for (ncclComm* comm : clique.ranks) {
    if (comm) comm->error = result;
  }
}

inline Group* front(ncclComm* comm) {
  return comm && !comm->issued.empty() ? &comm->issued[0] : nullptr;
}

inline bool stalled(const ncclComm* comm) { return comm->rank == faults.stalled_rank; }

inline ncclComm* make(std::shared_ptr<Clique> clique, int rank) {
  auto* comm = new ncclComm;
  comm->clique = std::move(clique);
  comm->rank = rank;
  comm->polls_left = faults.polls;
  comm->clique->ranks[rank] = comm;
  all.push_back(comm);
  ++alive;
  return comm;
}

inline void split(const Clique& parent) {
  std::map<int, std::vector<std::pair<int, int>>> by_color;  // color -> (key, rank)
  for (ncclComm* comm : parent.ranks) {
    const Operation& operation = comm->issued[0][0];
    if (operation.peer != NCCL_SPLIT_NOCOLOR) {
      by_color[operation.peer].push_back({operation.key, comm->rank});
    }
  }
  for (auto& [color, members] : by_color) {
    std::sort(members.begin(), members.end());
    auto clique = std::make_shared<Clique>(static_cast<int>(members.size()));
    for (size_t i = 0; i < members.size(); ++i) {
      *parent.ranks[members[i].second]->issued[0][0].child = make(clique, static_cast<int>(i));
    }
  }
}

inline void perform(Clique& clique) {
  std::vector<Operation*> all;
  for (ncclComm* comm : clique.ranks) all.push_back(&comm->issued[0][0]);
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

// A collective starts when all ranks are in it.
inline bool progress_collective(Clique& clique) {
  for (ncclComm* comm : clique.ranks) {
    const Group* group = front(comm);
    if (!group || stalled(comm) || (*group)[0].is_message()) return false;
  }
  const Operation& first = clique.ranks[0]->issued[0][0];
  for (ncclComm* comm : clique.ranks) {
    if (first.agrees(comm->issued[0][0])) continue;
    fail(clique, ncclInvalidUsage, "ranks disagree about a collective");
    return false;
  }
  perform(clique);
  for (ncclComm* comm : clique.ranks) comm->issued.pop_front();
  return true;
}

// The i-th send of a group to a peer goes to the peer's i-th receive from this rank.
inline bool progress_messages(Clique& clique, ncclComm* sender) {
  Group* sends = front(sender);
  if (!sends || stalled(sender)) return false;
  bool moved = false;
  for (Operation& send : *sends) {
    if (send.kind != Kind::kSend || send.done) continue;
    ncclComm* receiver = clique.ranks[send.peer];
    Group* recvs = front(receiver);
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

inline void progress(Clique& clique) {
  for (bool moved = clique.complete(); moved;) {
    moved = progress_collective(clique);
    for (ncclComm* comm : clique.ranks) moved |= progress_messages(clique, comm);
    for (ncclComm* comm : clique.ranks) {
      const Group* group = front(comm);
      const auto done = [](const Operation& operation) { return operation.done; };
      if (group && std::all_of(group->begin(), group->end(), done)) comm->issued.pop_front();
    }
  }
}

inline ncclResult_t state_of(ncclComm* comm) {
  if (comm->error != ncclSuccess) return comm->error;
  if (!comm->clique->complete() || faults.never_connects || !comm->issued.empty()) {
    return ncclInProgress;
  }
  if (comm->life == ncclComm::kFinalized && faults.never_quiet) return ncclInProgress;
  return comm->polls_left-- > 0 ? ncclInProgress : ncclSuccess;
}

inline ncclResult_t issue(ncclComm* comm, Group group) {
  if (comm->error != ncclSuccess) return comm->error;
  if (!comm->issued.empty() || comm->polls_left > 0) {
    misuse.push_back("a call while the one before, or the connecting, is in progress");
  }
  if (comm->life != ncclComm::kAlive) return ncclInvalidUsage;
  comm->polls_left = faults.polls;
  if (comm->rank == faults.failing_rank && comm->calls++ >= faults.calls_until_failure) {
    last_error = "a fault that was asked for";
    comm->error = faults.failure;
    return ncclInProgress;
  }
  comm->issued.push_back(std::move(group));
  progress(*comm->clique);
  return ncclInProgress;
}

}  // namespace fake_nccl
