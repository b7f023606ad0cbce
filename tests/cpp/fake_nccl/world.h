// The state of the fake NCCL: communicators, the operations they wait in, faults, and misuse.
#pragma once

#include <algorithm>
#include <atomic>
#include <condition_variable>
#include <cstdint>
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

// Where operations are done: within the call that asks for them, or by a kernel on a stream.
enum class Place { kHost, kDevice };

struct Clique {
  explicit Clique(int size) : ranks(size, nullptr) {}
  std::vector<ncclComm*> ranks;
  bool complete() const { return std::count(ranks.begin(), ranks.end(), nullptr) == 0; }
};

struct Faults {
  int version = NCCL_VERSION_CODE;
  int polls = 0;          // how often each call is in progress
  int stalled_rank = -1;  // its operations never end
  int failing_rank = -1;
  int calls_until_failure = 0;
  ncclResult_t failure = ncclRemoteError;
  bool never_connects = false;
  bool keeps_children = false;  // their pointers are never written
  bool never_quiet = false;
  bool makes_no_id = false;
  bool aborts_hang = false;
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
inline int (*current_device)() = nullptr;  // of the calling thread, where devices are looked at
inline auto& changed = *new std::condition_variable;  // a kernel has ended, or aborts go on

struct Call {
  ncclComm_t comm;
  Operation operation;
  cudaStream_t stream;
};
inline thread_local int group_depth = 0;
inline thread_local std::vector<Call> collected;

}  // namespace fake_nccl

struct ncclComm {
  std::shared_ptr<fake_nccl::Clique> clique;
  int rank = 0;
  int device = 0;                        // the current one when it was made
  std::deque<fake_nccl::Group> on_host;  // splits, and everything without a stream
  std::deque<std::pair<cudaStream_t, fake_nccl::Group>> kernels;  // in the order of the calls
  bool runs = false;                                              // the first of the kernels
  int polls_left = 0;
  int calls = 0;
  ncclResult_t error = ncclSuccess;
  enum { kAlive, kFinalized, kDestroyed, kAborted } life = kAlive;
  std::atomic<bool> inside{false};
  struct Unborn {  // a child whose pointer the caller does not have yet
    ncclComm** place;
    ncclComm* child;
    int looks_left = 1;
  };
  std::vector<Unborn> unborn;
};

namespace fake_nccl {

inline int device_now() { return current_device ? current_device() : 0; }

// Notes a second thread in the same communicator, calls after its end, and another current device.
class Visit {
 public:
  Visit(const char* name, ncclComm* comm, bool on_any_device = false) : comm_(comm) {
    if (comm_->inside.exchange(true)) note(name, "two threads in one communicator");
    std::this_thread::yield();  // gives the other thread its chance
    std::lock_guard lock(mutex);
    ++counts[name];
    if (comm_->life >= ncclComm::kDestroyed) misuse.push_back(std::string(name) + " after the end");
    if (!on_any_device && device_now() != comm_->device) {
      misuse.push_back(std::string(name) + " on another device");
    }
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

}  // namespace fake_nccl
