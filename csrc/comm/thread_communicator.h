// Ranks as threads of one process: for tests and simulation.
#pragma once

#include <chrono>
#include <condition_variable>
#include <deque>
#include <exception>
#include <memory>
#include <mutex>
#include <optional>
#include <string>
#include <vector>

#include "comm/communicator.h"

namespace bagua {

// Shared state of the ranks of one group.
//
// Thread safety: all methods. Ownership: shared by its communicators. A call that fails (timeout,
// mismatch, abort) fails the hub: every rank that waits wakes up, and every later call throws the
// same kind of error with the same message.
class ThreadHub final {
 public:
  // timeout: how long one call waits for the other ranks.
  ThreadHub(int size, std::chrono::milliseconds timeout);

  int size() const { return size_; }

 private:
  friend class ThreadCommunicator;

  enum class Collective { kAllReduce, kAllGather, kAllToAll, kBroadcast };

  // Tensors that one rank brings to a collective. all_reduce and broadcast use `output` alone.
  struct Call {
    Collective kind;
    at::Tensor input;
    at::Tensor output;
    ReduceOp op;
    int root;
  };

  // One half of a message: lives on the stack of exchange().
  struct Endpoint {
    at::Tensor tensor;
    int peer;
    bool done;
  };

  struct Mailbox {
    std::deque<Endpoint*> sends;
    std::deque<Endpoint*> recvs;
  };

  static std::string text(const Call& call);

  void meet(int rank, Call call);
  void exchange(int rank, c10::ArrayRef<Send> sends, c10::ArrayRef<Recv> recvs);
  void abort(int rank, const std::string& reason) noexcept;

  // All of these expect mutex_ to be held.
  Mailbox& mailbox(int from, int to) { return mailboxes_[from * size_ + to]; }
  void compare_with_others(int rank, const Call& call);
  void perform();
  void all_reduce_in_rank_order();
  void match(int from, int to);
  std::optional<int> stuck_peer(const std::vector<Endpoint>& endpoints) const;
  std::string absent_ranks() const;
  void fail(const std::exception_ptr& failure) noexcept;
  void throw_if_failed() const;
  template <typename Failure>
  [[noreturn]] void fail_and_throw(const std::string& message);

  const int size_;
  const std::chrono::milliseconds timeout_;
  std::mutex mutex_;
  std::condition_variable changed_;
  std::vector<std::optional<Call>> calls_;  // by rank: the collective it waits in
  int64_t meetings_ = 0;                    // collectives completed so far
  std::vector<Mailbox> mailboxes_;          // by (from, to)
  std::exception_ptr failure_;              // the first; null: none
};

// One rank of a ThreadHub. Tensors of CPU, or of one device that all ranks share, which every call
// waits for if there are several.
//
// Contracts of Communicator, and: all_reduce adds in rank order (kAvg divides each rank's values
// first), so results can be computed bit by bit elsewhere. Sizes, dtypes, roots or operations that
// differ between ranks, and a rank waiting in exchange for one that waits in a collective, throw
// MismatchError on all ranks, naming both. abort() on one rank ends the calls of all ranks.
class ThreadCommunicator final : public Communicator {
 public:
  ThreadCommunicator(std::shared_ptr<ThreadHub> hub, int rank);

  void all_reduce(at::Tensor& tensor, ReduceOp op) override;
  void all_gather(const at::Tensor& input, at::Tensor& output) override;
  void all_to_all(const at::Tensor& input, at::Tensor& output) override;
  void broadcast(at::Tensor& tensor, int root) override;
  using Communicator::exchange;
  void exchange(c10::ArrayRef<Send> sends, c10::ArrayRef<Recv> recvs,
                const OnReceived& on_received) override;
  void abort(const std::string& reason) noexcept override;

 private:
  std::shared_ptr<ThreadHub> hub_;
};

}  // namespace bagua
