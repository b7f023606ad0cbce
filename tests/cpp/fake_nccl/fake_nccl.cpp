// NCCL's functions over host memory, for ranks that are threads of one process.
//
// What a communicator must cope with is here: calls in non-blocking mode answer ncclInProgress and
// are done later, operations of a group are collected and start at its end. ncclCommSplit answers
// ncclSuccess at once, as NCCL 2.18 to 2.29 do: its parent is in progress then, and the child's
// pointer is written some time after the parent has come to rest. What a communicator must not do
// is noted (fake_nccl_misuse): two threads in one communicator, calls after its end, a second end,
// work while earlier work is in progress. Ranks that do not agree fail. fake_nccl_* sets up faults.
//
// A call with a stream returns when its kernel has been given to the stream. The kernel runs when
// those before it on the stream have ended and no other communicator's occupies the device, and
// ends when those of all ranks run. A call without a stream, as on the CPU, is in progress until
// its work is done. An abort waits for its communicator's kernels to run, and end, on every stream.
//
// There is no thread here: whoever calls lets the devices run as far as they come.
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

#include "fake_nccl/matching.h"
#include "fake_nccl/streams.h"
#include "fake_nccl/world.h"

using namespace fake_nccl;  // NOLINT: this file is the door of that namespace

namespace {

std::atomic<bool> occupied{false};

ncclResult_t add(const char* name, ncclComm_t comm, Operation operation, cudaStream_t stream) {
  const Visit visit(name, comm);
  std::lock_guard lock(mutex);
  last_stream = stream;
  if (group_depth == 0) return issue(comm, {operation}, stream);
  collected.push_back({comm, operation, stream});
  return ncclSuccess;
}

// Expects the mutex to be held.
void look_at(const ncclConfig_t& config) {
  if (config.blocking != 0) misuse.push_back("a communicator in blocking mode");
  if (config.splitShare != 0) misuse.push_back("a child waits for its parent's channels");
}

}  // namespace

extern "C" {

ncclResult_t ncclGetVersion(int* version) {
  *version = faults.version;
  return ncclSuccess;
}

const char* ncclGetErrorString(ncclResult_t result) {
  static const char* const kNames[] = {"no error",       "unhandled cuda error", "system error",
                                       "internal error", "invalid argument",     "invalid usage",
                                       "remote error",   "in progress"};
  return kNames[result];
}

const char* ncclGetLastError(ncclComm_t) {
  static thread_local std::string text;
  std::lock_guard lock(mutex);
  text = last_error;
  return text.c_str();
}

ncclResult_t ncclGetUniqueId(ncclUniqueId* id) {
  std::lock_guard lock(mutex);
  if (faults.makes_no_id) return ncclSystemError;
  std::memset(id->internal, 0xa5, sizeof(id->internal));  // no text: zero bytes and all others pass
  std::memcpy(id->internal, &++ids, sizeof(ids));
  return ncclSuccess;
}

ncclResult_t ncclCommInitRankConfig(ncclComm_t* comm, int size, ncclUniqueId id, int rank,
                                    ncclConfig_t* config) {
  std::lock_guard lock(mutex);
  ++counts["ncclCommInitRankConfig"];
  look_at(*config);
  auto& clique = cliques[std::string(id.internal, sizeof(id.internal))];
  if (!clique) clique = std::make_shared<Clique>(size);
  if (static_cast<int>(clique->ranks.size()) != size || clique->ranks[rank]) {
    last_error = "two ranks with the same number, or of groups of different sizes";
    return ncclInvalidArgument;
  }
  *comm = make(clique, rank);
  (*comm)->device = device_now();
  if (rank == faults.failing_rank && faults.calls_until_failure < 0) {
    last_error = "a fault that was asked for";
    (*comm)->error = faults.failure;
    clique->ranks[rank] = nullptr;  // the others wait for it
  }
  return ncclInProgress;
}

ncclResult_t ncclCommSplit(ncclComm_t comm, int color, int key, ncclComm_t* child,
                           ncclConfig_t* config) {
  const Visit visit("ncclCommSplit", comm);
  std::lock_guard lock(mutex);
  look_at(*config);
  Operation operation{.kind = Kind::kSplit};
  operation.peer = color;
  operation.key = key;
  operation.child = child;
  const ncclResult_t result = issue(comm, {operation}, nullptr);
  return result == ncclInProgress ? ncclSuccess : result;
}

ncclResult_t ncclCommGetAsyncError(ncclComm_t comm, ncclResult_t* state) {
  const Visit visit("ncclCommGetAsyncError", comm, /*on_any_device=*/true);
  std::lock_guard lock(mutex);
  progress(*comm->clique, Place::kHost);
  run_devices();
  *state = state_of(comm);
  if (*state == ncclSuccess && !faults.keeps_children) deliver(comm);
  return ncclSuccess;
}

ncclResult_t ncclCommFinalize(ncclComm_t comm) {
  const Visit visit("ncclCommFinalize", comm);
  std::lock_guard lock(mutex);
  if (comm->error != ncclSuccess) return comm->error;
  if (comm->life != ncclComm::kAlive) misuse.push_back("ncclCommFinalize for the second time");
  comm->life = ncclComm::kFinalized;
  comm->polls_left = faults.polls;
  return ncclInProgress;
}

ncclResult_t ncclCommDestroy(ncclComm_t comm) {
  const Visit visit("ncclCommDestroy", comm);
  std::lock_guard lock(mutex);
  if (comm->life != ncclComm::kFinalized) misuse.push_back("ncclCommDestroy of what is not quiet");
  comm->life = ncclComm::kDestroyed;
  --alive;
  return ncclSuccess;
}

ncclResult_t ncclCommAbort(ncclComm_t comm) {
  const Visit visit("ncclCommAbort", comm);
  std::unique_lock lock(mutex);
  changed.wait(lock, [] { return !faults.aborts_hang; });
  abort(comm, lock);
  --alive;
  return ncclSuccess;
}

ncclResult_t ncclGroupStart() {
  ++group_depth;
  return ncclSuccess;
}

ncclResult_t ncclGroupEnd() {
  if (--group_depth > 0) return ncclSuccess;
  const auto calls = std::exchange(collected, {});
  if (calls.empty()) return ncclSuccess;
  ncclComm_t const comm = calls[0].comm;
  const cudaStream_t stream = calls[0].stream;
  const Visit visit("ncclGroupEnd", comm);
  std::lock_guard lock(mutex);
  Group group;
  for (const Call& call : calls) {
    if (call.comm != comm || call.stream != stream || !call.operation.is_message()) {
      misuse.push_back("a group of mixed calls");
    }
    group.push_back(call.operation);
  }
  return issue(comm, std::move(group), stream);
}

ncclResult_t ncclAllReduce(const void* from, void* to, size_t count, ncclDataType_t type,
                           ncclRedOp_t reduce, ncclComm_t comm, cudaStream_t stream) {
  Operation operation{Kind::kAllReduce, from, to, count, type, reduce};
  return add("ncclAllReduce", comm, operation, stream);
}

ncclResult_t ncclAllGather(const void* from, void* to, size_t count, ncclDataType_t type,
                           ncclComm_t comm, cudaStream_t stream) {
  return add("ncclAllGather", comm, {Kind::kAllGather, from, to, count, type}, stream);
}

ncclResult_t ncclBroadcast(const void* from, void* to, size_t count, ncclDataType_t type, int root,
                           ncclComm_t comm, cudaStream_t stream) {
  Operation operation{Kind::kBroadcast, from, to, count, type, ncclSum, root};
  return add("ncclBroadcast", comm, operation, stream);
}

ncclResult_t ncclSend(const void* from, size_t count, ncclDataType_t type, int peer,
                      ncclComm_t comm, cudaStream_t stream) {
  Operation operation{Kind::kSend, from, nullptr, count, type, ncclSum, peer};
  return add("ncclSend", comm, operation, stream);
}

ncclResult_t ncclRecv(void* to, size_t count, ncclDataType_t type, int peer, ncclComm_t comm,
                      cudaStream_t stream) {
  Operation operation{Kind::kRecv, nullptr, to, count, type, ncclSum, peer};
  return add("ncclRecv", comm, operation, stream);
}

// For the tests.

void fake_nccl_reset() {
  std::lock_guard lock(mutex);
  faults = Faults();
  misuse.clear();
  counts.clear();
  last_error.clear();
}
void fake_nccl_set_version(int version) { faults.version = version; }
void fake_nccl_set_polls(int polls) { faults.polls = polls; }
void fake_nccl_stall(int rank) {
  std::lock_guard lock(mutex);
  faults.stalled_rank = rank;
}
// calls: how many calls of the rank are good before; -1: its connecting fails.
void fake_nccl_fail(int rank, int calls, int result) {
  std::lock_guard lock(mutex);
  faults.failing_rank = rank;
  faults.calls_until_failure = calls;
  faults.failure = static_cast<ncclResult_t>(result);
}
// Calls must come with their communicator's device; device() says which one is current.
void fake_nccl_look_at_devices(int (*device)()) { current_device = device; }
// Bits of the devices on which communicators were made.
unsigned fake_nccl_devices() {
  std::lock_guard lock(mutex);
  unsigned devices = 0;
  for (const ncclComm* comm : all) devices |= 1u << comm->device;
  return devices;
}
// A rank's running communicators get an error by themselves.
void fake_nccl_break(int rank, int result) {
  std::lock_guard lock(mutex);
  last_error = "the cable was pulled";
  for (auto& [id, clique] : cliques) {
    ncclComm* comm = rank < static_cast<int>(clique->ranks.size()) ? clique->ranks[rank] : nullptr;
    if (comm) comm->error = static_cast<ncclResult_t>(result);
  }
}
void fake_nccl_never_connect() { faults.never_connects = true; }
void fake_nccl_keep_children() { faults.keeps_children = true; }
void fake_nccl_never_quiet() { faults.never_quiet = true; }
void fake_nccl_hang_aborts(int on) {
  std::lock_guard lock(mutex);
  faults.aborts_hang = on != 0;
  changed.notify_all();
}
void fake_nccl_make_no_id() { faults.makes_no_id = true; }
int fake_nccl_alive() {
  std::lock_guard lock(mutex);
  return alive;
}
int fake_nccl_count(const char* name) {
  std::lock_guard lock(mutex);
  return counts[name];
}
const char* fake_nccl_misuse() {
  static std::string text;
  std::lock_guard lock(mutex);
  text.clear();
  for (const std::string& what : misuse) text += what + "\n";
  return text.c_str();
}
// How many kernels a stream has been given, and whether that many have ended.
uint64_t fake_nccl_given(void* stream) {
  std::lock_guard lock(mutex);
  return streams[static_cast<cudaStream_t>(stream)].given;
}
int fake_nccl_have_ended(void* handle, uint64_t kernels) {
  std::lock_guard lock(mutex);
  run_devices();
  const Stream& stream = streams[static_cast<cudaStream_t>(handle)];
  return stream.given - stream.kernels.size() >= kernels;
}
// Gives a stream a kernel that is asked until it answers that it has ended.
void fake_nccl_launch(void* stream, int (*has_ended)(void*), void* argument) {
  std::lock_guard lock(mutex);
  give(static_cast<cudaStream_t>(stream), {nullptr, has_ended, argument});
  run_devices();
}
// Gives a stream a kernel that ends when fake_nccl_release is called.
void fake_nccl_occupy(void* stream) {
  occupied = true;
  fake_nccl_launch(stream, [](void*) { return occupied ? 0 : 1; }, nullptr);
}
void fake_nccl_release() {
  occupied = false;
  std::lock_guard lock(mutex);
  run_devices();
}
void* fake_nccl_last_stream() {
  std::lock_guard lock(mutex);
  return last_stream;
}

}  // extern "C"

// The kernel that an extension without CUDA lacks: it finds this one if the library is preloaded.
namespace bagua {

uint32_t* make_device_flag() { return new uint32_t(0); }

void fill_if_set(const uint32_t* flag, std::byte* data, int64_t bytes, void* stream) {
  struct Fill {
    const uint32_t* flag;
    std::byte* data;
    int64_t bytes;
  };
  const auto fill = [](void* argument) {
    const std::unique_ptr<Fill> it(static_cast<Fill*>(argument));
    if (std::atomic_ref(*const_cast<uint32_t*>(it->flag)).load() != 0) {
      std::memset(it->data, 0xff, it->bytes);
    }
    return 1;
  };
  fake_nccl_launch(stream, fill, new Fill{flag, data, bytes});
}

}  // namespace bagua
