// Streams of the fake NCCL's devices, and the kernels that wait and run on them.
#pragma once

#include <cstdint>
#include <deque>
#include <map>

#include "fake_nccl/world.h"

namespace fake_nccl {

// A device runs one communicator's kernel at a time, as one does whose multiprocessors a kernel
// occupies while it waits for the other ranks: NCCL promises no more.
constexpr intptr_t kStreamsPerDevice = 8;

inline intptr_t device_of(cudaStream_t stream) {
  return reinterpret_cast<intptr_t>(stream) / kStreamsPerDevice;
}

// Work of a communicator, or of a test: a test's runs when it is asked, and says whether it has
// ended.
struct Kernel {
  ncclComm* comm;
  int (*has_ended)(void*);
  void* argument;
};

struct Stream {
  std::deque<Kernel> kernels;
  uint64_t given = 0;
};

inline auto& streams = *new std::map<cudaStream_t, Stream>;
inline auto& occupants = *new std::map<intptr_t, ncclComm*>;  // of devices

// The functions below expect the mutex to be held.

inline void give(cudaStream_t stream, const Kernel& kernel) {
  streams[stream].kernels.push_back(kernel);
  ++streams[stream].given;
}

// The running kernel of `comm` ends.
inline void end_kernel(ncclComm* comm) {
  const cudaStream_t stream = comm->kernels.front().first;
  streams[stream].kernels.pop_front();
  occupants.erase(device_of(stream));
  comm->kernels.pop_front();
  comm->runs = false;
}

// Whether something has happened at the head of a stream. A kernel of an aborted communicator ends
// when it runs, not before.
inline bool advance(cudaStream_t handle, Stream& stream) {
  if (stream.kernels.empty()) return false;
  const Kernel& first = stream.kernels.front();
  if (!first.comm) {
    if (!first.has_ended(first.argument)) return false;
    stream.kernels.pop_front();
    return true;
  }
  ncclComm* const comm = first.comm;
  const bool starts = !comm->runs && comm->kernels.front().first == handle &&
                      occupants.try_emplace(device_of(handle), comm).second;
  comm->runs = comm->runs || starts;
  if (!comm->runs || comm->life != ncclComm::kAborted) return starts;
  end_kernel(comm);
  return true;
}

}  // namespace fake_nccl
