#include "comm/c10d_communicator.h"

#include <algorithm>
#include <bit>
#include <exception>
#include <utility>

#include <ATen/ops/empty.h>
#include <ATen/ops/maximum.h>
#include <ATen/ops/minimum.h>

#include "base/check.h"
#include "comm/flat_copy.h"
#include "comm/tensor_checks.h"
#include "health/error_text.h"
#include "health/sanitize.h"

namespace bagua {
namespace {

// Note [gloo moves fragments]
// gloo's own all_to_all and all_gather are half-duplex for large messages (1.4 to 2.1 times the
// time that the wire needs). Messages in fragments of at most 1 MiB, every receive posted before
// the first send and the own part copied locally, take 1.05 times.
constexpr int64_t kFragmentBytes = 1 << 20;

// Note [Broadcasts in parts]
// In gloo's tree the root sends a tensor ceil(log2 P) times. Where each other rank passes a part of
// it on, all send it about once, at the same time but for a piece, and the way has two messages.
constexpr int64_t kPiecesOfPart = 8;
constexpr int64_t kLeastPiece = 64 << 10;

// Note [Sums in the order of gloo's ring]
// gloo cuts a tensor into parts, one per rank. That of rank p is summed on the way from rank p - 1
// down to rank p: x[p-1] + x[p-2] + ... + x[p], modulo P. Whoever adds the same parts in this order
// gets the same bits, by whatever way they came.
class RingParts {
 public:
  RingParts(int64_t numel, int64_t element_size, int size) : numel_(numel) {
    const auto up = [](int64_t value, int64_t unit) { return (value + unit - 1) / unit * unit; };
    const int64_t bytes = numel * element_size;
    const int64_t largest = std::max<int64_t>(1, kRingSegment / element_size) * element_size;
    const int64_t least = std::max<int64_t>((bytes + largest - 1) / largest, 2 * int64_t{size});
    const int64_t segments = up(least, size);
    const int64_t segment = up((bytes + segments - 1) / segments, element_size);
    stride_ = segments / size * segment / element_size;
  }

  at::Tensor of(const at::Tensor& tensor, int rank) const {
    const int64_t first = std::min(numel_, rank * stride_);
    return tensor.narrow(0, first, std::min(stride_, numel_ - first));
  }

 private:
  static constexpr int64_t kRingSegment = 1 << 20;  // gloo's largest

  int64_t numel_;
  int64_t stride_;
};

// gloo refuses negative tags.
constexpr uint32_t kTagBits = 0x3fffffffu;
constexpr uint32_t kTagOfAwaited = 0x40000000u;
int next_tag(uint32_t& count) { return static_cast<int>(count++ & kTagBits); }

c10d::ReduceOp to_c10d(ReduceOp op) {
  switch (op) {
    case ReduceOp::kSum:
      return c10d::ReduceOp::SUM;
    case ReduceOp::kAvg:
      return c10d::ReduceOp::AVG;
    case ReduceOp::kMin:
      return c10d::ReduceOp::MIN;
    case ReduceOp::kMax:
      return c10d::ReduceOp::MAX;
  }
  throw Error("unknown reduce op");
}

// `sum` becomes its sum with `other`, or the least or greatest.
void join(at::Tensor& sum, const at::Tensor& other, ReduceOp op) {
  if (op == ReduceOp::kMin) {
    at::minimum_out(sum, sum, other);
  } else if (op == ReduceOp::kMax) {
    at::maximum_out(sum, sum, other);
  } else {
    sum.add_(other);
  }
}

// Only once per work: a second wait on a gloo receive hangs.
void wait(const c10::intrusive_ptr<c10d::Work>& work) {
  BAGUA_CHECK(work->wait(), "the transport ended the call");
}

}  // namespace

C10dCommunicator::C10dCommunicator(c10::intrusive_ptr<c10d::Backend> backend)
    : Communicator({backend->getRank(), backend->getSize()}),
      backend_(std::move(backend)),
      is_gloo_(backend_->getBackendName() == "gloo"),
      is_nccl_(backend_->getBackendName() == "nccl"),
      send_tags_(group().size, 0),
      recv_tags_(group().size, 0),
      refusal_(group()),
      expected_(std::make_shared<std::deque<Expected>>()),
      awaited_(std::make_shared<Awaited>()) {}

void C10dCommunicator::all_reduce(at::Tensor& tensor, ReduceOp op) {
  check_all_reduce(tensor, op);
  guarded(CallSite::of("all_reduce", tensor), [&](CallSite& site) {
    if (group().size == 1 || tensor.numel() == 0) return;
    std::vector<at::Tensor> tensors{flat(tensor)};
    c10d::AllreduceOptions options;
    options.reduceOp = to_c10d(op);
    if (op == ReduceOp::kAvg && !(is_nccl_ && nccl_averages_well(tensor, group().size))) {
      tensors[0].div_(group().size);
      options.reduceOp = c10d::ReduceOp::SUM;
    }
    const bool adds = options.reduceOp == c10d::ReduceOp::SUM;
    // Least and greatest of floats: gloo has an order for NaN that is not torch's.
    const bool small = is_gloo_ && group().size <= kMostToldDirectly &&
                       static_cast<int64_t>(tensor.nbytes()) <= kMostAwaitedBytes;
    if ((short_paths_ || small) && (adds || at::isIntegralType(tensor.scalar_type(), true))) {
      return reduce_directly(site, tensors[0], adds ? ReduceOp::kSum : op);
    }
    wait(backend_->allreduce(tensors, options));
  });
}

// 1. Two ranks: each sends all it has. More: part p goes to rank p, every rank sends me my part.
// 2. Add in the ring's order. 3. More than two: my part goes to every rank.
void C10dCommunicator::reduce_directly(CallSite& site, at::Tensor& tensor, ReduceOp op) {
  const auto [rank, size] = group();
  const RingParts parts(tensor.numel(), static_cast<int64_t>(tensor.element_size()), size);
  if (size == 2) {
    at::Tensor other = received(tensor, 1, tensor.numel())[0];
    transfer(site, Send{tensor, 1 - rank}, Recv{other, 1 - rank});
    return join(tensor, other, op);
  }
  at::Tensor mine = parts.of(tensor, rank);
  const at::Tensor rows = received(tensor, size, mine.numel());
  std::vector<Send> sends, results;
  std::vector<Recv> recvs, others;
  for (int step = 1; step < size; ++step) {
    const int to = (rank + step) % size, from = (rank + size - step) % size;
    sends.push_back({parts.of(tensor, to), to});
    recvs.push_back({rows[from], from});
    results.push_back({mine, to});
    others.push_back({parts.of(tensor, from), from});
  }
  post_expected(site, recvs);
  post_expected(site, others);
  transfer(site, sends, recvs);
  const auto from = [&](int step) { return rows[(rank + size - step) % size]; };
  at::Tensor sum = from(1);
  for (int step = 2; step < size; ++step) join(sum, from(step), op);
  join(mine, sum, op);
  transfer(site, results, others);
}

at::Tensor C10dCommunicator::received(const at::Tensor& like, int64_t rows, int64_t numel) {
  const int64_t bytes = rows * numel * static_cast<int64_t>(like.element_size());
  if (!received_.defined() || received_.numel() < bytes) {
    received_ = at::empty({bytes}, like.options().dtype(at::kByte));
  }
  return received_.narrow(0, 0, bytes).view(like.scalar_type()).view({rows, numel});
}

void C10dCommunicator::broadcast(at::Tensor& tensor, int root) {
  check_broadcast(tensor, root, group());
  guarded(CallSite::of("broadcast", tensor, root == group().rank ? -1 : root), [&](CallSite& site) {
    if (group().size == 1 || tensor.numel() == 0) return;
    if (broadcasts_in_parts(tensor)) return broadcast_in_parts(site, tensor, root);
    std::vector<at::Tensor> tensors{flat(tensor)};
    c10d::BroadcastOptions options;
    options.rootRank = root;
    wait(backend_->broadcast(tensors, options));
  });
}

bool C10dCommunicator::broadcasts_in_parts(const at::Tensor& tensor) const {
  if (!is_gloo_ || group().size <= 2) return false;
  const bool large = static_cast<int64_t>(tensor.nbytes()) > kFragmentBytes;
  return short_paths_ || (large && group().size <= kMostToldDirectly);
}

// Every rank but the root has a part.
// 1. The root sends a piece of each part, then the next piece of each. 2. Ranks pass each piece of
// their own part on to all but the root as soon as it is there.
void C10dCommunicator::broadcast_in_parts(CallSite& site, at::Tensor& tensor, int root) {
  const auto [rank, size] = group();
  const at::Tensor bytes = flat(tensor).view(at::kByte);
  const int64_t part = (bytes.numel() + size - 2) / (size - 1);
  const int64_t step = std::clamp(part / kPiecesOfPart, kLeastPiece, kFragmentBytes);
  const auto piece = [&](int owner, int64_t begin) {
    const int64_t first = (owner + size - root) % size - 1;
    const auto at = [&](int64_t offset) {
      return std::min(first * part + std::min(offset, part), bytes.numel());
    };
    return bytes.narrow(0, at(begin), at(begin + step) - at(begin));
  };
  std::vector<Pending> posted, mine;
  for (int64_t begin = 0; begin < part; begin += step) {
    for (int owner = 0; owner < size; ++owner) {
      if (owner == root) continue;
      if (rank == root) {
        post_sends(site, {piece(owner, begin), owner}, posted);
      } else if (rank == owner) {
        post_receives(site, {piece(owner, begin), root}, mine);
      } else {
        post_receives(site, {piece(owner, begin), owner}, posted);
      }
    }
  }
  for (size_t number = 0; number < mine.size(); ++number) {
    site = mine[number].site;
    wait(mine[number].work);
    const at::Tensor own = piece(rank, static_cast<int64_t>(number) * step);
    for (int peer = 0; peer < size; ++peer) {
      if (peer != root) post_sends(site, {own, peer}, posted);
    }
  }
  wait_for(site, posted);
}

void C10dCommunicator::all_gather(const at::Tensor& input, at::Tensor& output) {
  check_all_gather(input, output, group());
  guarded(CallSite::of("all_gather", input), [&](CallSite& site) {
    if (input.numel() == 0) return;
    const auto [rank, size] = group();
    const int64_t slot = input.numel();
    at::Tensor source = flat(input);
    at::Tensor target = flat(output);
    if (!is_gloo_ && size > 1) return wait(backend_->_allgather_base(target, source));
    if (goes_by_doubling(target)) return all_gather_by_doubling(site, source, target);
    if (awaited_->bytes == static_cast<int64_t>(source.nbytes())) {
      return gather_awaited(site, source, target);
    }
    std::vector<Send> sends;
    std::vector<Recv> recvs;
    for (int step = 1; step < size; ++step) {
      const int to = (rank + step) % size;
      const int from = (rank + size - step) % size;
      sends.push_back({source, to});
      recvs.push_back({target.narrow(0, from * slot, slot), from});
    }
    transfer(site, sends, recvs);
    copy_unless_same(target.narrow(0, rank * slot, slot), source);
    const auto bytes = static_cast<int64_t>(source.nbytes());
    if (short_paths_ && awaited_->bytes == 0 && size > 1 && bytes <= kMostAwaitedBytes) {
      awaited_->bytes = bytes;
      await_next_gather(site);
    }
  });
}

void C10dCommunicator::await_next_gather(CallSite& site) {
  const auto [rank, size] = group();
  Awaited& next = *awaited_;
  next.posted.clear();
  next.slots = at::empty({size, next.bytes}, at::kByte);
  const int tag = static_cast<int>(kTagOfAwaited | (next.calls++ & kTagBits));
  for (int step = 1; step < size; ++step) {
    const int from = (rank + size - step) % size;
    std::vector<at::Tensor> message{next.slots[from]};
    site = CallSite::of(site.call, message[0], from);
    next.posted.push_back({backend_->recv(message, from, tag), site});
  }
}

// 1. Send to all ranks what they wait for. 2. Wait for theirs. 3. Wait for the next ones.
void C10dCommunicator::gather_awaited(CallSite& site, const at::Tensor& source,
                                      at::Tensor& target) {
  const auto [rank, size] = group();
  const int tag = static_cast<int>(kTagOfAwaited | ((awaited_->calls - 1) & kTagBits));
  std::vector<Pending> posted = std::exchange(awaited_->posted, {});
  for (int step = 1; step < size; ++step) {
    const int to = (rank + step) % size;
    std::vector<at::Tensor> message{source};
    site = CallSite::of(site.call, source, to);
    posted.push_back({backend_->send(message, to, tag), site});
  }
  wait_for(site, posted);
  awaited_->slots[rank].copy_(source.view(at::kByte));
  target.view(at::kByte).copy_(awaited_->slots.flatten());
  await_next_gather(site);
}

bool C10dCommunicator::goes_by_doubling(const at::Tensor& output) const {
  const bool small = static_cast<int64_t>(output.nbytes()) <= kMostRecordsBytes;
  return is_gloo_ && group().size > kMostToldDirectly && small && !short_paths_;
}

int64_t C10dCommunicator::messages_of_all_gather(const at::Tensor& output) const {
  if (!goes_by_doubling(output)) return group().size - 1;
  return std::bit_width(static_cast<unsigned>(group().size - 1));
}

// Slot i of `held` is of rank (rank + i) mod size.
// 1. Post every receive: of slots s to 2 s - 1, from the rank s after this one, for s = 1, 2, 4,
// ...
// 2. For each s, send slots 0 to s - 1, and wait for those that are received.
// 3. Put the slots into the order of ranks.
void C10dCommunicator::all_gather_by_doubling(CallSite& site, const at::Tensor& source,
                                              at::Tensor& target) {
  const auto [rank, size] = group();
  const int64_t slot = source.numel();
  const at::Tensor held = at::empty_like(target);
  held.narrow(0, 0, slot).copy_(source);
  const auto part = [&](int first, int stride) {
    return held.narrow(0, first * slot, std::min(stride, size - stride) * slot);
  };
  std::vector<Pending> received, sent;
  for (int stride = 1; stride < size; stride *= 2) {
    const int from = (rank + stride) % size;
    std::vector<at::Tensor> message{part(stride, stride)};
    site = CallSite::of(site.call, message[0], from);
    received.push_back({backend_->recv(message, from, next_tag(recv_tags_[from])), site});
  }
  auto next = received.begin();
  for (int stride = 1; stride < size; stride *= 2, ++next) {
    const int to = (rank + size - stride) % size;
    std::vector<at::Tensor> message{part(0, stride)};
    site = CallSite::of(site.call, message[0], to);
    sent.push_back({backend_->send(message, to, next_tag(send_tags_[to])), site});
    site = next->site;
    wait(next->work);
  }
  wait_for(site, sent);
  target.narrow(0, rank * slot, (size - rank) * slot)
      .copy_(held.narrow(0, 0, (size - rank) * slot));
  target.narrow(0, 0, rank * slot).copy_(held.narrow(0, (size - rank) * slot, rank * slot));
}

void C10dCommunicator::all_to_all(const at::Tensor& input, at::Tensor& output) {
  check_all_to_all(input, output, group());
  guarded(CallSite::of("all_to_all", input), [&](CallSite& site) {
    if (input.numel() == 0) return;
    const auto [rank, size] = group();
    const int64_t chunk = input.numel() / size;
    at::Tensor source = flat(input);
    at::Tensor target = flat(output);
    if (!is_gloo_ && size > 1) {
      std::vector<int64_t> equal_in, equal_out;  // empty: equal chunks
      return wait(backend_->alltoall_base(target, source, equal_out, equal_in));
    }
    std::vector<Send> sends;
    std::vector<Recv> recvs;
    for (int step = 1; step < size; ++step) {
      const int to = (rank + step) % size;
      const int from = (rank + size - step) % size;
      sends.push_back({source.narrow(0, to * chunk, chunk), to});
      recvs.push_back({target.narrow(0, from * chunk, chunk), from});
    }
    transfer(site, sends, recvs);
    target.narrow(0, rank * chunk, chunk).copy_(source.narrow(0, rank * chunk, chunk));
  });
}

void C10dCommunicator::exchange(c10::ArrayRef<Send> sends, c10::ArrayRef<Recv> recvs,
                                const OnReceived& on_received) {
  check_exchange(sends, recvs, group());
  try {
    guarded({"exchange", 0, at::kByte, -1}, [&](CallSite& site) {
      for (const auto& [source, target] : own_messages(sends, recvs, group().rank)) {
        copy_unless_same(flat(target), flat(source));
      }
      transfer(site, sends, recvs, on_received);
    });
  } catch (const CallbackFailed& failed) {
    std::rethrow_exception(failed.cause);
  }
}

void C10dCommunicator::expect(c10::ArrayRef<Recv> recvs) {
  if (!is_gloo_) return;
  guarded({"exchange", 0, at::kByte, -1}, [&](CallSite& site) { post_expected(site, recvs); });
}

void C10dCommunicator::post_expected(CallSite& site, c10::ArrayRef<Recv> recvs) {
  for (const Recv& recv : recvs) {
    expected_->push_back({recv.tensor.const_data_ptr(), {}});
    post_receives(site, recv, expected_->back().posted);
  }
}

// Whether the receive was expected, as all are once any is; its works are appended then.
bool C10dCommunicator::take_expected(const Recv& recv, std::vector<Pending>& posted) {
  if (expected_->empty()) return false;
  Expected next = std::move(expected_->front());
  expected_->pop_front();
  BAGUA_CHECK(next.memory == recv.tensor.const_data_ptr(), "another message was expected");
  std::ranges::move(next.posted, std::back_inserter(posted));
  return true;
}

void C10dCommunicator::post_receives(CallSite& site, const Recv& recv,
                                     std::vector<Pending>& posted) {
  post(site, recv.tensor, recv.peer, posted, [&](std::vector<at::Tensor>& message, int peer) {
    return backend_->recv(message, peer, next_tag(recv_tags_[peer]));
  });
}

void C10dCommunicator::post_sends(CallSite& site, const Send& send, std::vector<Pending>& posted) {
  post(site, send.tensor, send.peer, posted, [&](std::vector<at::Tensor>& message, int peer) {
    return backend_->send(message, peer, next_tag(send_tags_[peer]));
  });
}

void C10dCommunicator::wait_for(CallSite& site, const std::vector<Pending>& posted) {
  for (const Pending& one : posted) {
    site = one.site;
    wait(one.work);
  }
}

// Starts a message in fragments. Messages of a rank to itself are left out.
template <typename Start>
void C10dCommunicator::post(CallSite& site, const at::Tensor& tensor, int peer,
                            std::vector<Pending>& posted, Start start) {
  if (peer == group().rank || tensor.numel() == 0) return;
  site = CallSite::of(site.call, tensor, peer);
  for (at::Tensor& fragment : fragments(tensor)) {
    std::vector<at::Tensor> message{std::move(fragment)};
    posted.push_back({start(message, peer), site});
  }
}

// 1. Post every receive. 2. Post every send. 3. Wait for the receives in order, calling back after
// each, then for the sends.
void C10dCommunicator::transfer(CallSite& site, c10::ArrayRef<Send> sends,
                                c10::ArrayRef<Recv> recvs, const OnReceived& on_received) {
  std::vector<Pending> posted;
  std::vector<size_t> posted_up_to;  // by receive: how many of `posted` complete it
  posted.reserve(sends.size() + recvs.size());
  if (is_nccl_) backend_->startCoalescing();
  for (const Recv& recv : recvs) {
    if (!take_expected(recv, posted)) post_receives(site, recv, posted);
    posted_up_to.push_back(posted.size());
  }
  for (const Send& send : sends) {
    post_sends(site, send, posted);
  }
  size_t waited = 0;
  const auto wait_up_to = [&](size_t end) {
    for (; waited < end; ++waited) {
      site = posted[waited].site;
      if (posted[waited].work) wait(posted[waited].work);  // null: NCCL had nothing to coalesce
    }
  };
  if (is_nccl_) {
    posted.assign(1, {backend_->endCoalescing(), site});  // which stands for all
    wait_up_to(1);
  }
  for (size_t message = 0; message < recvs.size(); ++message) {
    if (!is_nccl_) wait_up_to(posted_up_to[message]);
    if (on_received) call_back(on_received, message);
  }
  wait_up_to(posted.size());
}

void C10dCommunicator::call_back(const OnReceived& on_received, size_t message) {
  try {
    on_received(message);
  } catch (const std::exception& error) {
    refusal_.refuse(concat("the caller failed during an exchange: ", error.what()));
    throw CallbackFailed{std::current_exception()};
  }
}

std::vector<at::Tensor> C10dCommunicator::fragments(const at::Tensor& tensor) const {
  const at::Tensor memory = flat(tensor);
  const int64_t bytes = static_cast<int64_t>(memory.nbytes());
  if (!is_gloo_ || bytes <= kFragmentBytes) return {memory};
  const int64_t step = kFragmentBytes / static_cast<int64_t>(memory.element_size());
  std::vector<at::Tensor> result;
  result.reserve(memory.numel() / step + 1);
  for (int64_t begin = 0; begin < memory.numel(); begin += step) {
    result.push_back(memory.narrow(0, begin, std::min(step, memory.numel() - begin)));
  }
  return result;
}

// gloo::IoException is not a c10::Error, hence std::exception.
template <typename Body>
void C10dCommunicator::guarded(CallSite site, Body body) {
  backend_.check("a communicator");
  refusal_.check(site.call);
  try {
    body(site);
  } catch (const std::exception& error) {
    fail(site, short_text(error));
  }
}

void C10dCommunicator::fail(const CallSite& site, const std::string& what) {
  const std::string message = refusal_.failure_text(site, reason_of_transport(what));
  refusal_.refuse_after(message);
  if (is_timeout_of_transport(what)) throw TimeoutError(message);
  throw TransportError(message);
}

void C10dCommunicator::abort(const std::string& reason) noexcept {
  if (!backend_.here()) return;
  refusal_.refuse(concat("aborted: ", reason));
  if (group().size == 1) return;
  try {
    backend_->abort();
  } catch (const std::exception&) {  // a transport that cannot abort has nothing to add
    return;
  }
}

}  // namespace bagua
