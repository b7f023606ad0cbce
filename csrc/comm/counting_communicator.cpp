#include "comm/counting_communicator.h"

#include <chrono>
#include <utility>

#include <ATen/record_function.h>

#include "base/check.h"

namespace bagua {
namespace {

// Adds the time of its life to a counter, also when it ends by an exception.
class Stopwatch {
 public:
  explicit Stopwatch(std::atomic<int64_t>& total) : total_(total) {}
  ~Stopwatch() {
    const auto elapsed = std::chrono::steady_clock::now() - start_;
    total_ += std::chrono::duration_cast<std::chrono::nanoseconds>(elapsed).count();
  }
  Stopwatch(const Stopwatch&) = delete;
  Stopwatch& operator=(const Stopwatch&) = delete;

 private:
  std::atomic<int64_t>& total_;
  const std::chrono::steady_clock::time_point start_ = std::chrono::steady_clock::now();
};

int64_t bytes_of(const at::Tensor& tensor) { return static_cast<int64_t>(tensor.nbytes()); }

const std::shared_ptr<Communicator>& not_null(const std::shared_ptr<Communicator>& inner) {
  BAGUA_CHECK_ARG(inner, "CountingCommunicator: there is no communicator to count");
  return inner;
}

}  // namespace

int broadcast_children(int rank, int size, int root) {
  const int from_root = (rank + size - root) % size;
  int children = 0;
  for (int64_t bit = 1; from_root + bit < size; bit *= 2) {
    if (bit > from_root) ++children;
  }
  return children;
}

CountingCommunicator::CountingCommunicator(std::shared_ptr<Communicator> inner)
    : Communicator(not_null(inner)->group()), inner_(std::move(inner)) {}

Traffic CountingCommunicator::traffic() const {
  const int64_t sent = bytes_sent_;
  return {sent,    bytes_received_, messages_sent_, messages_received_, shares_memory() ? sent : 0,
          wire_ns_};
}

void CountingCommunicator::all_reduce(at::Tensor& tensor, ReduceOp op) {
  timed("bagua::all_reduce", [&] { inner_->all_reduce(tensor, op); });
  count_all_reduce(tensor);
}

void CountingCommunicator::count_all_reduce(const at::Tensor& tensor) {
  const int64_t others = group().size - 1;
  const int64_t bytes = 2 * bytes_of(tensor) * others / group().size;
  count_sent(2 * others, bytes);
  count_received(2 * others, bytes);
}

class CountingCommunicator::CountedBucket final : public SharedBucket {
 public:
  CountedBucket(CountingCommunicator& communicator, std::shared_ptr<SharedBucket> inner,
                at::Tensor tensor)
      : communicator_(communicator), inner_(std::move(inner)), tensor_(std::move(tensor)) {}

  void all_reduce(ReduceOp op) override {
    communicator_.timed("bagua::all_reduce", [&] { inner_->all_reduce(op); });
    communicator_.count_all_reduce(tensor_);
  }

 private:
  CountingCommunicator& communicator_;
  const std::shared_ptr<SharedBucket> inner_;
  const at::Tensor tensor_;
};

std::shared_ptr<SharedBucket> CountingCommunicator::share(const at::Tensor& tensor) {
  std::shared_ptr<SharedBucket> inner = inner_->share(tensor);
  if (!inner) return nullptr;
  return std::make_shared<CountedBucket>(*this, std::move(inner), tensor);
}

void CountingCommunicator::all_gather(const at::Tensor& input, at::Tensor& output) {
  timed("bagua::all_gather", [&] { inner_->all_gather(input, output); });
  const int64_t messages = inner_->messages_of_all_gather(output);
  const int64_t bytes = (group().size - 1) * bytes_of(input);
  count_sent(messages, bytes);
  count_received(messages, bytes);
}

void CountingCommunicator::all_to_all(const at::Tensor& input, at::Tensor& output) {
  timed("bagua::all_to_all", [&] { inner_->all_to_all(input, output); });
  const int64_t others = group().size - 1;
  const int64_t chunk = bytes_of(input) / group().size;
  count_sent(others, others * chunk);
  count_received(others, others * chunk);
}

void CountingCommunicator::broadcast(at::Tensor& tensor, int root) {
  timed("bagua::broadcast", [&] { inner_->broadcast(tensor, root); });
  const int64_t bytes = bytes_of(tensor);
  const bool is_root = group().rank == root;
  if (inner_->broadcasts_in_parts(tensor)) {
    const int64_t parts = group().size - 1;
    if (is_root) return count_sent(parts, bytes);
    count_sent(parts - 1, (parts - 1) * bytes / parts);
    return count_received(parts, bytes);
  }
  const int64_t children = broadcast_children(group().rank, group().size, root);
  count_sent(children, children * bytes);
  count_received(is_root ? 0 : 1, is_root ? 0 : bytes);
}

void CountingCommunicator::exchange(c10::ArrayRef<Send> sends, c10::ArrayRef<Recv> recvs,
                                    const OnReceived& on_received) {
  std::atomic<int64_t> callbacks_ns{0};
  timed("bagua::exchange", [&] {
    inner_->exchange(sends, recvs, [&](size_t message) {
      const Stopwatch stopwatch(callbacks_ns);
      on_received(message);
    });
  });
  wire_ns_ -= callbacks_ns;
  for (const Send& send : sends) {
    if (send.peer != group().rank) count_sent(1, bytes_of(send.tensor));
  }
  for (const Recv& recv : recvs) {
    if (recv.peer != group().rank) count_received(1, bytes_of(recv.tensor));
  }
}

void CountingCommunicator::abort(const std::string& reason) noexcept { inner_->abort(reason); }

template <typename Call>
void CountingCommunicator::timed(const char* name, Call call) {
  RECORD_FUNCTION(name, {});
  const Stopwatch stopwatch(wire_ns_);
  call();
}

// A message without bytes is not sent.
void CountingCommunicator::count_sent(int64_t messages, int64_t bytes) {
  if (bytes == 0) return;
  messages_sent_ += messages;
  bytes_sent_ += bytes;
}

void CountingCommunicator::count_received(int64_t messages, int64_t bytes) {
  if (bytes == 0) return;
  messages_received_ += messages;
  bytes_received_ += bytes;
}

}  // namespace bagua
