#include "comm/shm/shared_memory_communicator.h"

#include <algorithm>
#include <cstring>
#include <exception>
#include <span>
#include <utility>

#include <ATen/ops/full.h>
#include <unistd.h>

#include "base/check.h"
#include "comm/flat_copy.h"
#include "comm/shm/in_place.h"
#include "comm/shm/reduction.h"
#include "comm/shm/shareable_tensor.h"
#include "comm/shm/shared_exchange.h"
#include "comm/shm/unix_socket.h"
#include "comm/tensor_checks.h"

namespace bagua {
namespace {

using std::chrono::milliseconds;

// Up to this many bytes of all ranks together each rank reduces everything: one meeting instead of
// two.
constexpr int64_t kWholeBytes = 64 << 10;

constexpr milliseconds kForAMessage(1000);  // which is there, as its sender has said

void check_cpu(const char* call, const at::Tensor& tensor) {
  BAGUA_CHECK(tensor.device().is_cpu(), call, ": shared memory moves CPU tensors, got one on ",
              tensor.device().str());
}

std::byte* bytes_of(const at::Tensor& tensor) { return static_cast<std::byte*>(tensor.data_ptr()); }

void copy_bytes(std::byte* target, const std::byte* source, int64_t bytes) {
  if (target != source) std::memcpy(target, source, static_cast<size_t>(bytes));
}

// Bytes of a piece of an all-reduce, of all parts together: what is shown, joined and copied is
// still in the caches then.
constexpr int64_t kReducedBytes = 128 << 10;
static_assert(kReducedBytes <= static_cast<int64_t>(kHalfBytes));

// Bytes of a piece for each of `size` ranks.
int64_t place_bytes(int size) {
  constexpr auto kLine = static_cast<int64_t>(kLineBytes);
  return kReducedBytes / size / kLine * kLine;
}

}  // namespace

SharedMemoryCommunicator::SharedMemoryCommunicator(Group group, SharedGroup shared,
                                                   milliseconds timeout)
    : Communicator(group),
      process_(getpid()),
      shared_(std::move(shared)),
      refusal_(group),
      waits_(group, shared_, refusal_, timeout),
      meetings_(waits_, shared_) {
  const size_t bytes = ring_bytes(group.size);
  for (int peer = 0; peer < group.size; ++peer) {
    const auto ring = [&](int from, int to) {
      return shared_.memory[from]->data() + ring_offset(group.size, to);
    };
    const RankState& theirs = shared_.state(peer);
    writers_.emplace_back(mine(), theirs, ring(group.rank, peer), bytes, group.rank, peer);
    readers_.emplace_back(mine(), theirs, ring(peer, group.rank), bytes, group.rank, peer);
  }
}

SharedMemoryCommunicator::~SharedMemoryCommunicator() {
  if (getpid() != process_) return;
  Ended not_yet = Ended::kNot;
  mine().ended.compare_exchange_strong(not_yet, Ended::kLeft);
  waits_.ring_all();
}

std::byte* SharedMemoryCommunicator::half(int rank, uint64_t number) const {
  return shared_.memory[rank]->data() + kHalvesOffset + number % 2 * kHalfBytes;
}

void SharedMemoryCommunicator::abort(const std::string& reason) noexcept {
  if (getpid() != process_) return;
  refusal_.refuse(concat("aborted: ", reason));
  give_up();
  waits_.ring(group().rank);
}

void SharedMemoryCommunicator::give_up() noexcept {
  mine().ended.store(Ended::kGaveUp);
  waits_.ring_all();
}

template <typename Body>
void SharedMemoryCommunicator::guarded(const CallSite& site, Body body) {
  refusal_.check(site.call);
  BAGUA_CHECK(getpid() == process_, site.call, ": this communicator is of process ", process_,
              ", whose child this is; a child makes a separate group");
  try {
    body();
  } catch (const std::exception& error) {
    refusal_.refuse_after(error.what());
    give_up();
    throw;
  }
}

void SharedMemoryCommunicator::all_reduce(at::Tensor& tensor, ReduceOp op) {
  check_all_reduce(tensor, op);
  check_cpu("all_reduce", tensor);
  check_reduction(tensor.scalar_type(), op);
  const CallSite site = CallSite::of("all_reduce", tensor);
  guarded(site, [&] {
    if (group().size == 1 || tensor.numel() == 0) return;
    meetings_.describe(site, SharedCall::kAllReduce, op);
    if (reduces_whole(site)) return reduce_whole(site, tensor, op);
    reduce_in_pieces(site, tensor, op);
  });
}

bool SharedMemoryCommunicator::reduces_whole(const CallSite& site) const {
  return site.bytes * group().size <= kWholeBytes;
}

// 1. Show all values. 2. Join those of all ranks.
void SharedMemoryCommunicator::reduce_whole(const CallSite& site, const at::Tensor& values,
                                            ReduceOp op) {
  std::memcpy(half(group().rank), values.data_ptr(), static_cast<size_t>(site.bytes));
  meetings_.meet(site);
  std::vector<const std::byte*> sources;
  for (int rank = 0; rank < group().size; ++rank) sources.push_back(half(rank));
  reduce_in_order(bytes_of(values), nullptr, sources, site.dtype, op, values.numel());
  end_half();
}

// Note [Pieces of an all-reduce]
// A piece has three steps: each rank shows the values that others join; joins its part of all
// ranks' values and shows the result; copies the other parts. The steps of three pieces lie between
// two meetings, so there is one meeting for each piece, and two more. Pieces take the halves in
// turn. A rank's place in a half is the same in all pieces: it holds the rank's results, which
// others copy while the rest of the half is written for the piece after the next.
void SharedMemoryCommunicator::reduce_in_pieces(const CallSite& site, const at::Tensor& values,
                                                ReduceOp op) {
  const int64_t numel = values.numel();
  const auto element = static_cast<int64_t>(values.element_size());
  const int64_t step = place_bytes(group().size) / element * group().size;
  const int64_t count = (numel + step - 1) / step;
  const auto piece = [&](int64_t number) {
    const int64_t first = number * step;
    return BucketPiece(bytes_of(values) + first * element, std::min(step, numel - first),
                       group().size, element);
  };
  for (int64_t turn = 0; turn < count + 2; ++turn) {
    if (turn >= 2) copy_results(piece(turn - 2), halves_used_ + turn - 2);
    if (turn >= 1 && turn <= count)
      join_part(piece(turn - 1), halves_used_ + turn - 1, site.dtype, op);
    if (turn < count) show_values(piece(turn), halves_used_ + turn);
    if (turn <= count) meetings_.meet(site);
  }
  halves_used_ += count;
}

void SharedMemoryCommunicator::show_values(const BucketPiece& piece, uint64_t number) {
  const auto [me, size] = group();
  for (int rank = 0; rank < size; ++rank) {
    if (rank == me) continue;
    std::memcpy(half(me, number) + rank * place_bytes(size), piece.part(rank), piece.bytes(rank));
  }
}

void SharedMemoryCommunicator::join_part(const BucketPiece& piece, uint64_t number,
                                         at::ScalarType dtype, ReduceOp op) {
  const auto [me, size] = group();
  const int64_t place = me * place_bytes(size);
  std::vector<const std::byte*> sources;
  for (int rank = 0; rank < size; ++rank) {
    sources.push_back(rank == me ? piece.part(me) : half(rank, number) + place);
  }
  reduce_in_order(piece.part(me), half(me, number) + place, sources, dtype, op, piece.length(me));
}

// Not all from the same rank at the same time.
void SharedMemoryCommunicator::copy_results(const BucketPiece& piece, uint64_t number) {
  const auto [me, size] = group();
  for (int other = 1; other < size; ++other) {
    const int rank = (me + other) % size;
    std::memcpy(piece.part(rank), half(rank, number) + rank * place_bytes(size), piece.bytes(rank));
  }
}

class SharedMemoryCommunicator::Bucket final : public SharedBucket {
 public:
  using Memory = std::vector<std::shared_ptr<SharedMemory>>;

  Bucket(SharedMemoryCommunicator& communicator, at::Tensor tensor, Memory memory, int number)
      : communicator_(communicator),
        tensor_(std::move(tensor)),
        memory_(std::move(memory)),
        number_(number) {
    values_ = {.of_rank = {}, .numel = tensor_.numel(), .dtype = tensor_.scalar_type()};
    for (const auto& of_rank : memory_) values_.of_rank.push_back(of_rank->data());
  }

  // A small bucket is faster by way of the halves: with one meeting instead of three.
  void all_reduce(ReduceOp op) override {
    check_reduction(values_.dtype, op);
    const CallSite site = CallSite::of("all_reduce", tensor_);
    communicator_.guarded(site, [&] {
      communicator_.meetings_.describe(site, SharedCall::kReduceInPlace, op, number_);
      if (communicator_.reduces_whole(site)) return communicator_.reduce_whole(site, tensor_, op);
      reduce_in_place(communicator_.meetings_, site, values_, op);
    });
  }

 private:
  SharedMemoryCommunicator& communicator_;
  const at::Tensor tensor_;
  const Memory memory_;  // by rank
  const int number_;
  InPlaceValues values_;
};

bool SharedMemoryCommunicator::all_can(bool can) {
  at::Tensor answer = at::full({1}, can, at::kByte);
  all_reduce(answer, ReduceOp::kMin);
  return answer.item<uint8_t>() != 0;
}

// 1. Move the tensor. 2. Hand its memory over. 3. Map that of the others. After each step all ranks
// learn whether all could.
std::shared_ptr<SharedBucket> SharedMemoryCommunicator::share(const at::Tensor& tensor) {
  if (group().size == 1 || !can_share_) return nullptr;
  const auto could = [&](auto step) {
    try {
      step();
      return true;
    } catch (const Error&) {
      return false;
    }
  };
  std::shared_ptr<SharedMemory> own;
  if (!all_can(could([&] { own = make_shareable(tensor); }))) return nullptr;
  can_share_ = all_can(could([&] { hand_over(*own); }));
  if (!can_share_) return nullptr;
  std::vector<std::shared_ptr<SharedMemory>> memory;
  can_share_ = all_can(could([&] { memory = take_over(own); }));
  if (!can_share_) return nullptr;
  return std::make_shared<Bucket>(*this, tensor, std::move(memory), static_cast<int>(++buckets_));
}

void SharedMemoryCommunicator::hand_over(const SharedMemory& memory) {
  const int file = memory.file().number();
  const uint32_t number = buckets_ + 1;
  for (const auto& link : shared_.links) {
    if (link) send_message(link->socket(), std::as_bytes(std::span(&number, 1)), {&file, 1});
  }
}

std::vector<std::shared_ptr<SharedMemory>> SharedMemoryCommunicator::take_over(
    const std::shared_ptr<SharedMemory>& own) {
  std::vector<std::shared_ptr<SharedMemory>> memory;
  for (int rank = 0; rank < group().size; ++rank) {
    if (rank == group().rank) {
      memory.push_back(own);
      continue;
    }
    uint32_t number = 0;
    std::vector<FileDescriptor> files;
    const bool came =
        receive_message(shared_.links[rank]->socket(),
                        std::as_writable_bytes(std::span(&number, 1)), files, 1, kForAMessage);
    BAGUA_CHECK(came && files.size() == 1 && number == buckets_ + 1, "rank ", rank,
                " has not handed over the memory of bucket ", buckets_ + 1);
    memory.push_back(SharedMemory::open(files[0], own->bytes(), SharedMemory::Writers::kOwner));
  }
  return memory;
}

void SharedMemoryCommunicator::all_gather(const at::Tensor& input, at::Tensor& output) {
  check_all_gather(input, output, group());
  check_cpu("all_gather", input);
  const CallSite site = CallSite::of("all_gather", input);
  guarded(site, [&] {
    if (input.numel() == 0) return;
    const int me = group().rank;
    std::byte* const target = bytes_of(output);
    copy_bytes(target + me * site.bytes, bytes_of(input), site.bytes);
    if (group().size == 1) return;
    meetings_.describe(site, SharedCall::kAllGather);
    constexpr auto kStep = static_cast<int64_t>(kHalfBytes);
    for (int64_t first = 0; first < site.bytes; first += kStep) {
      const int64_t bytes = std::min(kStep, site.bytes - first);
      // The own slot has the input, which may be any other slot.
      copy_bytes(half(me), target + me * site.bytes + first, bytes);
      meetings_.meet(site);
      for (int step = 1; step < group().size; ++step) {
        const int rank = (me + step) % group().size;
        copy_bytes(target + rank * site.bytes + first, half(rank), bytes);
      }
      end_half();
    }
  });
}

void SharedMemoryCommunicator::all_to_all(const at::Tensor& input, at::Tensor& output) {
  check_all_to_all(input, output, group());
  check_cpu("all_to_all", input);
  const CallSite site = CallSite::of("all_to_all", input);
  guarded(site, [&] {
    if (input.numel() == 0) return;
    const auto [me, size] = group();
    const int64_t chunk = site.bytes / size;
    copy_bytes(bytes_of(output) + me * chunk, bytes_of(input) + me * chunk, chunk);
    if (size == 1) return;
    meetings_.describe(site, SharedCall::kAllToAll);
    const int64_t place = static_cast<int64_t>(kHalfBytes) / size;
    for (int64_t first = 0; first < chunk; first += place) {
      const int64_t bytes = std::min(place, chunk - first);
      for (int rank = 0; rank < size; ++rank) {
        if (rank == me) continue;
        copy_bytes(half(me) + rank * place, bytes_of(input) + rank * chunk + first, bytes);
      }
      meetings_.meet(site);
      for (int step = 1; step < size; ++step) {
        const int rank = (me + step) % size;
        copy_bytes(bytes_of(output) + rank * chunk + first, half(rank) + me * place, bytes);
      }
      end_half();
    }
  });
}

void SharedMemoryCommunicator::broadcast(at::Tensor& tensor, int root) {
  check_broadcast(tensor, root, group());
  check_cpu("broadcast", tensor);
  const CallSite site = CallSite::of("broadcast", tensor, root == group().rank ? -1 : root);
  guarded(site, [&] {
    if (group().size == 1 || tensor.numel() == 0) return;
    meetings_.describe(site, SharedCall::kBroadcast, ReduceOp::kSum, root);
    constexpr auto kStep = static_cast<int64_t>(kHalfBytes);
    for (int64_t first = 0; first < site.bytes; first += kStep) {
      const int64_t bytes = std::min(kStep, site.bytes - first);
      const bool sends = root == group().rank;
      if (sends) copy_bytes(half(root), bytes_of(tensor) + first, bytes);
      meetings_.meet(site);
      if (!sends) copy_bytes(bytes_of(tensor) + first, half(root), bytes);
      end_half();
    }
  });
}

void SharedMemoryCommunicator::exchange(c10::ArrayRef<Send> sends, c10::ArrayRef<Recv> recvs,
                                        const OnReceived& on_received) {
  check_exchange(sends, recvs, group());
  for (const Send& send : sends) check_cpu("exchange", send.tensor);
  for (const Recv& recv : recvs) check_cpu("exchange", recv.tensor);
  guarded({"exchange", 0, at::kByte, -1}, [&] {
    for (const auto& [source, target] : own_messages(sends, recvs, group().rank)) {
      copy_unless_same(flat(target), flat(source));
    }
    SharedExchange(waits_, writers_, readers_, sends, recvs).run(on_received);
  });
}

}  // namespace bagua
