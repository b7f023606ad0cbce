// A communicator that counts what passes through it.
#pragma once

#include <atomic>
#include <cstdint>
#include <memory>
#include <string>

#include "comm/communicator.h"

namespace bagua {

// Payload that went to and came from other ranks, without packet headers, and the time spent in the
// calls.
struct Traffic {
  int64_t bytes_sent = 0;
  int64_t bytes_received = 0;
  int64_t messages_sent = 0;
  int64_t messages_received = 0;
  int64_t shm_bytes = 0;  // of bytes_sent: through memory of one host, not over a network
  int64_t wire_ns = 0;    // nanoseconds inside the inner communicator, failed calls included

  Traffic& operator+=(const Traffic& other) {
    bytes_sent += other.bytes_sent;
    bytes_received += other.bytes_received;
    messages_sent += other.messages_sent;
    messages_received += other.messages_received;
    shm_bytes += other.shm_bytes;
    wire_ns += other.wire_ns;
    return *this;
  }
  Traffic operator-(const Traffic& other) const {
    return {bytes_sent - other.bytes_sent,       bytes_received - other.bytes_received,
            messages_sent - other.messages_sent, messages_received - other.messages_received,
            shm_bytes - other.shm_bytes,         wire_ns - other.wire_ns};
  }
};

// Forwards every call, under its name in profiles, and counts it once it has succeeded. Per rank,
// for P ranks:
// - exchange: each message to or from another rank; exact.
// - all_gather of S bytes of input: S (P - 1) bytes sent and received, in P - 1 messages or, where
//   gloo passes small ones on, in ceil(log2 P); exact on gloo.
// - all_to_all of S bytes of input: P - 1 messages of S / P, sent and received; exact on gloo.
// - all_reduce of S bytes: 2 (P - 1) messages, 2 S (P - 1) / P bytes, sent and received: the ring
//   algorithm of gloo and, but that two ranks need one message, the one of shortened paths; exact
//   but for the rounding of S / P.
// - broadcast of S bytes: one message of S received by all but the root; sent to the children in
//   gloo's binomial tree (see broadcast_children); exact on gloo, the same total elsewhere. In
//   parts: P - 1 messages and S bytes sent by the root, and received by each other, who sends P - 2
//   messages of S / (P - 1); exact but for the rounding of S / (P - 1).
// Memory that ranks share is counted by the same rules, and in shm_bytes too.
//
// Thread safety: as Communicator; traffic() from any thread, each number is current, several
// numbers may be of different calls. Ownership: shares the inner communicator.
class CountingCommunicator final : public Communicator {
 public:
  explicit CountingCommunicator(std::shared_ptr<Communicator> inner);

  Traffic traffic() const;

  void all_reduce(at::Tensor& tensor, ReduceOp op) override;
  void all_gather(const at::Tensor& input, at::Tensor& output) override;
  void all_to_all(const at::Tensor& input, at::Tensor& output) override;
  void broadcast(at::Tensor& tensor, int root) override;
  using Communicator::exchange;
  void exchange(c10::ArrayRef<Send> sends, c10::ArrayRef<Recv> recvs,
                const OnReceived& on_received) override;
  void expect(c10::ArrayRef<Recv> recvs) override { inner_->expect(recvs); }
  void shorten_paths() override { inner_->shorten_paths(); }
  const std::shared_ptr<Communicator>& inner() const { return inner_; }

  bool shares_memory() const override { return inner_->shares_memory(); }
  // Its calls are counted as all_reduce.
  std::shared_ptr<SharedBucket> share(const at::Tensor& tensor) override;
  void check() override { inner_->check(); }
  void invalidate_if_aborted(at::Tensor& result) override { inner_->invalidate_if_aborted(result); }
  void abort(const std::string& reason) noexcept override;

 private:
  class CountedBucket;

  template <typename Call>
  void timed(const char* name, Call call);
  void count_all_reduce(const at::Tensor& tensor);
  void count_sent(int64_t messages, int64_t bytes);
  void count_received(int64_t messages, int64_t bytes);

  const std::shared_ptr<Communicator> inner_;
  std::atomic<int64_t> bytes_sent_{0};
  std::atomic<int64_t> bytes_received_{0};
  std::atomic<int64_t> messages_sent_{0};
  std::atomic<int64_t> messages_received_{0};
  std::atomic<int64_t> wire_ns_{0};
};

// Number of ranks that `rank` sends to in a binomial tree rooted at `root`. With ranks counted from
// the root, rank v gets its data from v without its highest bit, and passes it on to every v + 2^i
// inside the group with 2^i > v.
int broadcast_children(int rank, int size, int root);

}  // namespace bagua
