#include "comm/thread_communicator.h"

#include <exception>
#include <utility>

#include <ATen/ops/maximum.h>
#include <ATen/ops/minimum.h>

#include "base/check.h"
#include "comm/device_stream.h"
#include "comm/flat_copy.h"
#include "comm/tensor_checks.h"

namespace bagua {
namespace {

std::string shape_text(const at::Tensor& tensor) {
  return concat(tensor.numel(), " ", dtype_text(tensor.scalar_type()));
}

// Ranks read and write each other's tensors. On a device, each under a separate stream: all wait
// for the device before they meet and after. A rank alone stays on its stream.
template <typename Meeting>
void settled(Group group, at::Device device, Meeting meeting) {
  if (group.size > 1) synchronize(device);
  meeting();
  if (group.size > 1) synchronize(device);
}

}  // namespace

ThreadHub::ThreadHub(int size, std::chrono::milliseconds timeout) : size_(size), timeout_(timeout) {
  BAGUA_CHECK_ARG(size >= 1, "ThreadHub: a group needs at least one rank, got size ", size);
  BAGUA_CHECK_ARG(timeout.count() > 0, "ThreadHub: the timeout must be positive, got ",
                  timeout.count(), " ms");
  calls_.resize(size);
  mailboxes_.resize(static_cast<size_t>(size) * size);
}

std::string ThreadHub::text(const Call& call) {
  switch (call.kind) {
    case Collective::kAllReduce:
      return concat("all_reduce of ", shape_text(call.output), " (", reduce_op_text(call.op), ")");
    case Collective::kAllGather:
      return concat("all_gather of ", shape_text(call.input));
    case Collective::kAllToAll:
      return concat("all_to_all of ", shape_text(call.input));
    case Collective::kBroadcast:
      return concat("broadcast of ", shape_text(call.output), " from rank ", call.root);
  }
  return "unknown call";
}

// 1. Refuse a call that differs from those of the ranks already here.
// 2. The last rank to arrive does the work of all, in rank order, and opens the next meeting.
// 3. The others wait for it; a rank that waits too long fails the hub, naming who is absent.
void ThreadHub::meet(int rank, Call call) {
  std::unique_lock lock(mutex_);
  throw_if_failed();
  compare_with_others(rank, call);
  const std::string name = text(call);
  calls_[rank] = std::move(call);
  if (absent_ranks().empty()) {
    try {
      perform();
    } catch (const std::exception& error) {
      fail_and_throw<Error>(concat("rank ", rank, ": ", name, ": ", error.what()));
    }
    for (auto& waiting : calls_) waiting.reset();
    ++meetings_;
    changed_.notify_all();
    return;
  }
  changed_.notify_all();  // a rank may wait in exchange for this one: see stuck_peer
  const int64_t meeting = meetings_;
  const bool in_time =
      changed_.wait_for(lock, timeout_, [&] { return meetings_ != meeting || failure_; });
  if (meetings_ != meeting) return;
  if (!in_time) {
    fail_and_throw<TimeoutError>(concat("rank ", rank, " of ", size_, ": ", name,
                                        " timed out after ", timeout_.count(),
                                        " ms, missing: ", absent_ranks()));
  }
  throw_if_failed();
}

void ThreadHub::compare_with_others(int rank, const Call& call) {
  for (int other = 0; other < size_; ++other) {
    if (!calls_[other]) continue;
    const std::string mine = text(call);
    const std::string theirs = text(*calls_[other]);
    if (mine != theirs) {
      fail_and_throw<MismatchError>(concat("ranks disagree: rank ", other, " called ", theirs,
                                           ", rank ", rank, " called ", mine));
    }
    return;  // those already here agree with each other
  }
}

void ThreadHub::perform() {
  const Call& first = *calls_[0];
  if (first.kind == Collective::kAllReduce) return all_reduce_in_rank_order();
  if (first.kind == Collective::kBroadcast) {
    for (auto& call : calls_) copy_unless_same(call->output, calls_[first.root]->output);
    return;
  }
  const bool gathers = first.kind == Collective::kAllGather;
  const int64_t slot = first.output.numel() / size_;
  for (int from = 0; from < size_; ++from) {
    for (int to = 0; to < size_; ++to) {
      const at::Tensor& input = calls_[from]->input;
      copy_unless_same(calls_[to]->output.narrow(0, from * slot, slot),
                       gathers ? input : input.narrow(0, to * slot, slot));
    }
  }
}

void ThreadHub::all_reduce_in_rank_order() {
  const ReduceOp op = calls_[0]->op;
  at::Tensor result = calls_[0]->output.clone();
  if (op == ReduceOp::kAvg) result.div_(size_);
  for (int rank = 1; rank < size_; ++rank) {
    const at::Tensor& other = calls_[rank]->output;
    if (op == ReduceOp::kSum) result.add_(other);
    if (op == ReduceOp::kAvg) result.add_(other.div(size_));
    if (op == ReduceOp::kMin) result = at::minimum(result, other);
    if (op == ReduceOp::kMax) result = at::maximum(result, other);
  }
  for (auto& call : calls_) call->output.copy_(result);
}

// 1. Post all receives, then all sends; each half that finds its other half is copied at once.
// 2. Wait until all of this rank's endpoints are done.
void ThreadHub::exchange(int rank, c10::ArrayRef<Send> sends, c10::ArrayRef<Recv> recvs) {
  std::unique_lock lock(mutex_);
  throw_if_failed();
  std::vector<Endpoint> endpoints;
  endpoints.reserve(sends.size() + recvs.size());  // the mailboxes hold pointers into it
  for (const Recv& recv : recvs) {
    endpoints.push_back({flat(recv.tensor), recv.peer, false});
    mailbox(recv.peer, rank).recvs.push_back(&endpoints.back());
    match(recv.peer, rank);
  }
  for (const Send& send : sends) {
    endpoints.push_back({flat(send.tensor), send.peer, false});
    mailbox(rank, send.peer).sends.push_back(&endpoints.back());
    match(rank, send.peer);
  }
  const auto pending = [&] {
    std::string peers;
    for (const Endpoint& endpoint : endpoints) {
      if (!endpoint.done) peers += concat(peers.empty() ? "rank " : ", ", endpoint.peer);
    }
    return peers;
  };
  const bool in_time = changed_.wait_for(lock, timeout_, [&] {
    return failure_ || pending().empty() || stuck_peer(endpoints).has_value();
  });
  if (pending().empty()) return;
  throw_if_failed();
  if (!in_time) {
    fail_and_throw<TimeoutError>(concat("rank ", rank, " of ", size_, ": exchange timed out after ",
                                        timeout_.count(), " ms, missing: ", pending()));
  }
  const int peer = *stuck_peer(endpoints);
  fail_and_throw<MismatchError>(concat("ranks disagree: rank ", rank, " called exchange with rank ",
                                       peer, ", rank ", peer, " called ", text(*calls_[peer])));
}

void ThreadHub::match(int from, int to) {
  Mailbox& box = mailbox(from, to);
  if (box.sends.empty() || box.recvs.empty()) return;
  Endpoint& send = *box.sends.front();
  Endpoint& recv = *box.recvs.front();
  if (send.tensor.numel() != recv.tensor.numel() ||
      send.tensor.scalar_type() != recv.tensor.scalar_type()) {
    fail_and_throw<MismatchError>(concat("ranks disagree: rank ", from, " sends ",
                                         shape_text(send.tensor), " to rank ", to,
                                         ", which expects ", shape_text(recv.tensor)));
  }
  box.sends.pop_front();
  box.recvs.pop_front();
  copy_unless_same(recv.tensor, send.tensor);
  send.done = recv.done = true;
  changed_.notify_all();
}

// A peer that waits in a collective waits for this rank, and this rank for it: neither can
// continue.
std::optional<int> ThreadHub::stuck_peer(const std::vector<Endpoint>& endpoints) const {
  for (const Endpoint& endpoint : endpoints) {
    if (!endpoint.done && calls_[endpoint.peer]) return endpoint.peer;
  }
  return std::nullopt;
}

std::string ThreadHub::absent_ranks() const {
  std::string ranks;
  for (int rank = 0; rank < size_; ++rank) {
    if (!calls_[rank]) ranks += concat(ranks.empty() ? "rank " : ", ", rank);
  }
  return ranks;
}

void ThreadHub::abort(int rank, const std::string& reason) noexcept {
  std::lock_guard lock(mutex_);
  fail(std::make_exception_ptr(
      TransportError(concat("rank ", rank, " of ", size_, " aborted: ", reason))));
}

// The first failure stays. No rank will access the waiting ranks' tensors any more.
void ThreadHub::fail(const std::exception_ptr& failure) noexcept {
  if (!failure_) failure_ = failure;
  for (auto& call : calls_) call.reset();
  changed_.notify_all();
}

void ThreadHub::throw_if_failed() const {
  if (failure_) std::rethrow_exception(failure_);
}

template <typename Failure>
void ThreadHub::fail_and_throw(const std::string& message) {
  fail(std::make_exception_ptr(Failure(message)));
  std::rethrow_exception(failure_);
}

ThreadCommunicator::ThreadCommunicator(std::shared_ptr<ThreadHub> hub, int rank)
    : Communicator({rank, hub->size()}), hub_(std::move(hub)) {
  BAGUA_CHECK_ARG(rank >= 0 && rank < hub_->size(), "rank ", rank, " is outside a group of size ",
                  hub_->size());
}

void ThreadCommunicator::all_reduce(at::Tensor& tensor, ReduceOp op) {
  check_all_reduce(tensor, op);
  settled(group(), tensor.device(), [&] {
    hub_->meet(group().rank, {ThreadHub::Collective::kAllReduce, {}, flat(tensor), op, 0});
  });
}

void ThreadCommunicator::all_gather(const at::Tensor& input, at::Tensor& output) {
  check_all_gather(input, output, group());
  settled(group(), input.device(), [&] {
    hub_->meet(group().rank,
               {ThreadHub::Collective::kAllGather, flat(input), flat(output), ReduceOp::kSum, 0});
  });
}

void ThreadCommunicator::all_to_all(const at::Tensor& input, at::Tensor& output) {
  check_all_to_all(input, output, group());
  settled(group(), input.device(), [&] {
    hub_->meet(group().rank,
               {ThreadHub::Collective::kAllToAll, flat(input), flat(output), ReduceOp::kSum, 0});
  });
}

void ThreadCommunicator::broadcast(at::Tensor& tensor, int root) {
  check_broadcast(tensor, root, group());
  settled(group(), tensor.device(), [&] {
    hub_->meet(group().rank,
               {ThreadHub::Collective::kBroadcast, {}, flat(tensor), ReduceOp::kSum, root});
  });
}

void ThreadCommunicator::exchange(c10::ArrayRef<Send> sends, c10::ArrayRef<Recv> recvs,
                                  const OnReceived& on_received) {
  check_exchange(sends, recvs, group());
  if (sends.empty() && recvs.empty()) return;
  const at::Device device = (sends.empty() ? recvs.front().tensor : sends.front().tensor).device();
  settled(group(), device, [&] { hub_->exchange(group().rank, sends, recvs); });
  for (size_t message = 0; message < recvs.size(); ++message) on_received(message);
}

void ThreadCommunicator::abort(const std::string& reason) noexcept {
  hub_->abort(group().rank, reason);
}

}  // namespace bagua
