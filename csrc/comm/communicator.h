// A group of ranks and five ways to move tensors between them.
#pragma once

#include <functional>
#include <memory>
#include <string>

#include <ATen/core/Tensor.h>
#include <c10/util/ArrayRef.h>

namespace bagua {

enum class ReduceOp { kSum, kAvg, kMin, kMax };

struct Group {
  int rank;
  int size;
};

struct Send {
  at::Tensor tensor;
  int peer;
};

struct Recv {
  at::Tensor tensor;
  int peer;
};

// Takes the position of a message in the list of receives.
using OnReceived = std::function<void(size_t)>;

// A tensor that the ranks of a communicator reduce where it lies.
class SharedBucket {
 public:
  SharedBucket() = default;
  virtual ~SharedBucket() = default;
  SharedBucket(const SharedBucket&) = delete;
  SharedBucket& operator=(const SharedBucket&) = delete;

  // Communicator::all_reduce() of the tensor, with its contract.
  virtual void all_reduce(ReduceOp op) = 0;
};

// Moves tensors; knows no codec.
//
// Thread safety: one owner (a lane, or the main thread); only check() and abort() may be called
// from another thread. Ownership: tensors are the caller's and must stay alive until the call
// returns. Ordering: all ranks make the same calls in the same order; on return the effect is
// ordered on the current stream (CPU: complete). Sizes agree across ranks and are never read off
// the wire. May fail: throws Error or TimeoutError that names the peer where the transport knows
// it; after a failure the communicator refuses further calls.
class Communicator {
 public:
  explicit Communicator(Group group) : group_(group) {}
  virtual ~Communicator() = default;
  Communicator(const Communicator&) = delete;
  Communicator& operator=(const Communicator&) = delete;

  Group group() const { return group_; }

  // In place. kAvg divides by the group's size. The result has the same bits on every rank.
  virtual void all_reduce(at::Tensor& tensor, ReduceOp op) = 0;

  // output.numel() == size * input.numel(); slot i of the output is rank i's input.
  virtual void all_gather(const at::Tensor& input, at::Tensor& output) = 0;

  // Equal numel, divisible by size: chunk j of rank i becomes chunk i of rank j.
  virtual void all_to_all(const at::Tensor& input, at::Tensor& output) = 0;

  // Messages that each rank sends and receives in such a call.
  virtual int64_t messages_of_all_gather(const at::Tensor& /*output*/) const {
    return group_.size - 1;
  }

  virtual void broadcast(at::Tensor& tensor, int root) = 0;

  // Whether every rank but the root gets a part of such a tensor, and passes it on to the others.
  virtual bool broadcasts_in_parts(const at::Tensor& /*tensor*/) const { return false; }

  // Point to point: every receive is posted before the first send, so that any pattern in which
  // each send has its receive is free of deadlock. Several messages between the same two ranks
  // are matched in order. A peer may be this rank itself (copied locally).
  // `on_received` is called for each receive, in the order of `recvs`, when its message is there;
  // where the transport can, while the later ones are still under way. An exception from it ends
  // the call.
  virtual void exchange(c10::ArrayRef<Send> sends, c10::ArrayRef<Recv> recvs,
                        const OnReceived& on_received) = 0;
  void exchange(c10::ArrayRef<Send> sends, c10::ArrayRef<Recv> recvs) {
    exchange(sends, recvs, [](size_t) {});
  }

  // Tells what the next calls of exchange() receive, in their order, and nothing else is called
  // before them. Peers may write to these tensors from now on. Saves the way there where a message
  // waits until its receiver is known to wait for it.
  virtual void expect(c10::ArrayRef<Recv> /*recvs*/) {}

  // Later calls are to need few dependent messages, whatever the number of connections: a message
  // takes long. All ranks call it between the same two calls. Results keep their bits.
  virtual void shorten_paths() {}

  // Whether all of its ranks are on one host and move bytes through memory that they share.
  virtual bool shares_memory() const { return false; }

  // Throws what a later call would throw, if a call that had been put on a stream has failed since.
  // Thread-safe. Where calls are complete on return there is nothing to find.
  virtual void check() {}

  // Puts work on the current stream that sets all bits of `result`, NaN in every float dtype, if a
  // call before it was ended by an abort and not by itself. Nothing where calls are complete on
  // return. Note [Aborted collectives]
  virtual void invalidate_if_aborted(at::Tensor& /*result*/) {}

  // Thread-safe. Later calls throw, naming the reason; calls in flight end where the transport can
  // end them (see each implementation).
  virtual void abort(const std::string& reason) noexcept = 0;

  // Lets the ranks read each other's `tensor`, which is all of its storage, where it lies. All
  // ranks call it. Null, on all of them, where the transport or a rank cannot, or their sizes
  // differ. The memory may move: nothing but tensors may point into it. The communicator outlives
  // the result.
  virtual std::shared_ptr<SharedBucket> share(const at::Tensor& /*tensor*/) { return nullptr; }

 private:
  Group group_;
};

}  // namespace bagua
