// NCCL without torch in between: one communicator of our own per lane.
#pragma once

#include <chrono>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include <torch/csrc/distributed/c10d/Store.hpp>

#include "comm/communicator.h"
#include "comm/nccl/nccl_library.h"

namespace bagua {

// A group of ranks, each with a separate CUDA device, over a separate ncclComm_t.
//
// Contracts of Communicator, and:
// - A call returns when NCCL has put its work on the current stream of the tensors' device; it does
//   not wait for the GPU. All tensors are on the communicator's device and their memory belongs to
//   that stream, or stays until the work is done.
// - kAvg is NCCL's own. What is only moved is moved as bytes, so that any dtype will do; all_reduce
//   takes bool and those that NCCL can add (u8, i8, i32, i64, f16, bf16, f32, f64).
// - all_to_all and exchange are one group of sends and receives; on_received is called for all
//   receives after it: each effect is ordered on the stream.
// - Group size 1 never touches NCCL, unless it was asked to. Messages without elements are not
// sent.
// - A call that cannot be put on the stream within `timeout` throws TimeoutError. One that is there
//   is watched (NcclWatchdog): an error that NCCL reports, or no end within `timeout`, aborts the
//   communicator, which frees the stream; failure() says so at once and the next call throws it.
//   All messages are "rank r of n: <call> of <bytes> bytes <dtype> with peer p failed: <reason>".
// - abort() ends the calls in flight, also those on the stream.
// - The destructor lets the sent reach the peers, for at most the timeout or ten seconds, and
//   aborts then. After fork it leaves everything to the parent.
// - Sizes that differ between ranks are the caller's error: NCCL cannot see them.
// - A device that is not a CUDA device has no stream (a null handle) and nothing to watch: a
// library
//   that works on host memory can stand in for NCCL.
class NcclCommunicator : public Communicator {
 public:
  using Communicator::Communicator;

  // Collective over this group: a communicator of `members` (ranks of this group, in the order of
  // the new one) on those, null on the others. Groups that do not overlap may be split off in one
  // call, each rank naming its own.
  virtual std::shared_ptr<NcclCommunicator> split(const std::vector<int>& members) = 0;

  // Why later calls will be refused; nullopt while all is well. From any thread.
  virtual std::optional<std::string> failure() const = 0;
};

struct NcclOptions {
  std::shared_ptr<const NcclLibrary> library;
  c10::intrusive_ptr<c10d::Store> store;  // of this group alone: a prefix
  Group group;
  at::Device device;
  std::chrono::milliseconds timeout;  // of the connecting, and of each call
  bool alone_too = false;  // a group of one has an ncclComm_t as well: for tests with one GPU
};

// Connects the ranks: all of them call this. Throws Error, or TimeoutError naming who is missing.
std::shared_ptr<NcclCommunicator> make_nccl_communicator(const NcclOptions& options);

}  // namespace bagua
