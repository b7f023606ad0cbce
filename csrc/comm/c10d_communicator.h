// Any backend of torch.distributed: gloo on CPU, NCCL on CUDA.
#pragma once

#include <cstdint>
#include <deque>
#include <exception>
#include <memory>
#include <string>
#include <vector>

#include <torch/csrc/distributed/c10d/Backend.hpp>

#include "base/owner_process.h"
#include "comm/call_site.h"
#include "comm/communicator.h"
#include "comm/refusal.h"

namespace bagua {

// Note [Records of many ranks]
// Ranks compare small records in each round: of P ranks each would send P - 1 messages. So where
// there are more than kMostToldDirectly of them, gloo's all_gather of at most kMostRecordsBytes
// passes on what it has got in ceil(log2 P) steps, to the rank 1, 2, 4, ... before, of as many
// bytes. Then a rank needs connections to these alone. Where messages take long, a rank still sends
// all of them at once.
inline constexpr int kMostToldDirectly = 8;
inline constexpr int64_t kMostRecordsBytes = 256 << 10;

// Note [Messages wait for their receivers]
// gloo sends a message when the peer has told that it waits for it: a round trip for what takes
// half of one. So receives are posted as early as they are known:
// - those that an op expects (Communicator::expect), before the messages that come first;
// - where paths are short, those of the next all_gather of few bytes, of which ranks make one in
//   each round, to agree on it. They have tags apart, since other calls may come before it.
inline constexpr int64_t kMostAwaitedBytes = 1 << 10;

// A group of ranks over a c10d backend; rank, size and timeout are the backend's.
//
// Contracts of Communicator, and:
// - gloo: all_gather, all_to_all and exchange are point to point (Note [gloo moves fragments]).
//   kAvg divides first and adds then, as DDP does; NCCL averages by itself where it does well.
// - Group size 1 never touches the backend. Messages without elements are not sent.
// - The backend gets aliases of the tensors without Python objects: gloo's thread may drop the last
//   reference while Python is finalizing.
// - A failed call throws Error or TimeoutError, "rank r of n: <call> of <bytes> bytes <dtype> with
//   peer p failed: <reason>". gloo ends a blocked call at the group's timeout only, abort()
//   included (NCCL's are ended), and a message that failed late may still be written to its buffer.
// - Sizes that differ between ranks are the caller's error: gloo cannot see them and may return
//   wrong data or wait until the timeout.
class C10dCommunicator final : public Communicator {
 public:
  explicit C10dCommunicator(c10::intrusive_ptr<c10d::Backend> backend);

  void all_reduce(at::Tensor& tensor, ReduceOp op) override;
  void all_gather(const at::Tensor& input, at::Tensor& output) override;
  int64_t messages_of_all_gather(const at::Tensor& output) const override;
  void all_to_all(const at::Tensor& input, at::Tensor& output) override;
  void broadcast(at::Tensor& tensor, int root) override;
  bool broadcasts_in_parts(const at::Tensor& tensor) const override;
  using Communicator::exchange;
  void exchange(c10::ArrayRef<Send> sends, c10::ArrayRef<Recv> recvs,
                const OnReceived& on_received) override;
  void expect(c10::ArrayRef<Recv> recvs) override;
  // gloo's ring takes 2 (P - 1) messages, one after the other. Afterwards a sum takes two, and one
  // between two ranks, as that of at most kMostAwaitedBytes among few ranks does anyway: Note [Sums
  // in the order of gloo's ring]. A broadcast takes two: Note [Broadcasts in parts].
  void shorten_paths() override { short_paths_ = is_gloo_; }
  void abort(const std::string& reason) noexcept override;

 private:
  struct Pending {
    c10::intrusive_ptr<c10d::Work> work;
    CallSite site;
  };
  // A receive that was posted before its call.
  struct Expected {
    const void* memory;
    std::vector<Pending> posted;
  };
  // Receives of the next all_gather of so many bytes from each rank; slot r of `slots`: rank r's.
  struct Awaited {
    int64_t bytes = 0;  // 0: none has been made
    uint32_t calls = 0;
    at::Tensor slots;
    std::vector<Pending> posted;
  };
  // Carries an exception of a caller's callback past guarded(), which would call it the
  // transport's.
  struct CallbackFailed {
    std::exception_ptr cause;
  };

  template <typename Body>
  void guarded(CallSite site, Body body);
  void transfer(CallSite& site, c10::ArrayRef<Send> sends, c10::ArrayRef<Recv> recvs,
                const OnReceived& on_received = nullptr);
  template <typename Start>
  void post(CallSite& site, const at::Tensor& tensor, int peer, std::vector<Pending>& posted,
            Start start);
  void post_receives(CallSite& site, const Recv& recv, std::vector<Pending>& posted);
  void post_sends(CallSite& site, const Send& send, std::vector<Pending>& posted);
  static void wait_for(CallSite& site, const std::vector<Pending>& posted);
  void post_expected(CallSite& site, c10::ArrayRef<Recv> recvs);
  bool take_expected(const Recv& recv, std::vector<Pending>& posted);
  void await_next_gather(CallSite& site);
  void gather_awaited(CallSite& site, const at::Tensor& source, at::Tensor& target);
  void broadcast_in_parts(CallSite& site, at::Tensor& tensor, int root);
  void reduce_directly(CallSite& site, at::Tensor& tensor, ReduceOp op);
  at::Tensor received(const at::Tensor& like, int64_t rows, int64_t numel);
  bool goes_by_doubling(const at::Tensor& output) const;
  void all_gather_by_doubling(CallSite& site, const at::Tensor& source, at::Tensor& target);
  void call_back(const OnReceived& on_received, size_t message);
  std::vector<at::Tensor> fragments(const at::Tensor& tensor) const;
  [[noreturn]] void fail(const CallSite& site, const std::string& what);

  const OwnersOnly<c10::intrusive_ptr<c10d::Backend>> backend_;
  const bool is_gloo_;
  const bool is_nccl_;
  std::vector<uint32_t> send_tags_;  // by peer: messages so far, counted alike on both sides
  std::vector<uint32_t> recv_tags_;
  Refusal refusal_;
  bool short_paths_ = false;
  at::Tensor received_;  // memory of reduce_directly()
  // Behind the backend, which they refer to. Shared, so that a forked child leaves them alone.
  OwnersOnly<std::shared_ptr<std::deque<Expected>>> expected_;
  OwnersOnly<std::shared_ptr<Awaited>> awaited_;
};

}  // namespace bagua
