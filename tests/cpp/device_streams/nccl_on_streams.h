// NcclCommunicator on the fake device, over the fake NCCL, whose collectives end when those of all
// ranks run: what waits for whom.
#pragma once

#include <array>
#include <atomic>
#include <chrono>
#include <functional>
#include <memory>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include <torch/csrc/distributed/c10d/HashStore.hpp>
#include <torch/csrc/distributed/c10d/PrefixStore.hpp>

#include "comm/nccl/nccl_communicator.h"
#include "comm/nccl/nccl_library.h"
#include "device_streams/subjects.h"
#include "fake_nccl/switches.h"
#include "op/async_average.h"

namespace bagua::fake {
namespace {

using Nccl = std::shared_ptr<NcclCommunicator>;

// A stream of a rank's GPU, see kStreamsPerDevice in fake_nccl/streams.h.
int64_t stream_of(int rank, int stream = 0) { return 8 * (rank + 1) + stream; }

void* handle_of(int64_t stream) { return Guard().getStreamNativeHandle(Guard::stream(stream)); }

bool is_idle(void* stream) { return fake_nccl_have_ended(stream, fake_nccl_given(stream)) != 0; }

// False: not within some seconds.
bool until(const std::function<bool()>& condition) {
  for (int ms = 0; ms < 3000 && !condition(); ++ms) {
    std::this_thread::sleep_for(std::chrono::milliseconds(1));
  }
  return condition();
}

// Communicators of two ranks: by rank.
std::vector<Nccl> connect_two(const std::string& library) {
  static int groups = 0;
  const auto store = c10::make_intrusive<c10d::PrefixStore>(concat("group", groups++),
                                                            c10::make_intrusive<c10d::HashStore>());
  const auto opened = open_nccl_library(library);
  std::vector<Nccl> ranks(2);
  std::vector<std::thread> threads;
  for (int rank = 0; rank < 2; ++rank) {
    threads.emplace_back([&, rank] {
      ranks[rank] =
          make_nccl_communicator({opened, store, {rank, 2}, kFake, std::chrono::seconds(20)});
    });
  }
  for (std::thread& thread : threads) thread.join();
  return ranks;
}

// The fake device learns of the collectives that are under way.
class NcclOnStreams final : public LoopbackCommunicator {
 public:
  explicit NcclOnStreams(Nccl inner)
      : LoopbackCommunicator(inner->group().size), inner_(std::move(inner)) {}

  void all_reduce(at::Tensor& tensor, ReduceOp op) override {
    const int stream = current_stream();
    void* const handle = handle_of(stream);
    const uint64_t last = fake_nccl_given(handle) + 1;
    Device::instance().access(stream, "ncclAllReduce", tensor.data_ptr(), tensor.nbytes(), true);
    Device::instance().begin_collective(stream,
                                        [=] { return fake_nccl_have_ended(handle, last) != 0; });
    inner_->all_reduce(tensor, op);
  }
  void check() override { inner_->check(); }
  void invalidate_if_aborted(at::Tensor& result) override { inner_->invalidate_if_aborted(result); }
  void abort(const std::string& reason) noexcept override { inner_->abort(reason); }

 private:
  const Nccl inner_;
};

// Another rank is late with its weights: training goes on meanwhile.
void asynchronous_averaging_waits_for_ranks_outside_the_gate(const std::string& library) {
  const std::vector<Nccl> ranks = connect_two(library);
  at::Tensor weights = gradient(1).to(kFake), others = gradient(2).to(kFake);
  const at::Tensor mean = gradient(1).add_(gradient(2)).div_(2);
  auto gate = std::make_shared<WeightGate>();
  AsyncAverage op(std::make_shared<NcclOnStreams>(ranks[0]), {weights}, gate);
  op.training_leaves();
  synchronize(kFake);
  std::atomic<bool> is_late = true;
  const int before = fake_nccl_count("ncclAllReduce");
  std::thread late([&] {
    const OnStream guard(stream_of(1));
    at::Tensor goes_on = zeros_on(kFake, 1, at::kByte);
    ranks[1]->all_reduce(goes_on, ReduceOp::kMin);
    until([&] { return !is_late; });
    ranks[1]->all_reduce(others, ReduceOp::kAvg);
    until([&] { return is_idle(handle_of(stream_of(1))); });
  });
  std::thread lane([&] {
    const OnStream guard(stream_of(0));
    op.run(false);
  });
  const bool asked = until([&] { return fake_nccl_count("ncclAllReduce") - before >= 3; });
  Device::instance().until_a_host_waits_for_collectives();
  std::atomic<bool> inside = false;
  std::thread training([&] {
    gate->enter();
    inside = true;
    gate->leave();
  });
  const bool in_time = until([&] { return inside.load(); });
  is_late = false;
  lane.join();
  training.join();
  late.join();
  op.training_enters();
  expect(asked && in_time, "training waited at the gate for another rank");
  expect(at::allclose(weights.cpu(), mean), "asynchronous averaging: another mean");
  expect_no_race("asynchronous averaging over NCCL");
}

// A kernel of an optimizer.
struct Step {
  float* weights;
  const float* gradients;
  static int run(void* self) {
    const auto [weights, gradients] = *static_cast<Step*>(self);
    for (int64_t i = 0; i < kNumel; ++i) weights[i] -= gradients[i];
    return 1;
  }
};

// The other rank never comes; the optimizer's step is on the stream when the collective is aborted.
void partial_sums_do_not_reach_the_weights(const std::string& library) {
  const std::vector<Nccl> ranks = connect_two(library);
  const auto comm = std::make_shared<NcclOnStreams>(ranks[0]);
  Subject subject = subjects().front();
  subject.make = [&](const Place&) { return std::make_shared<AllReduce>(comm, ReduceOp::kAvg); };
  const std::vector<at::Tensor> flats = make_flats(subject, kFake);
  const std::unique_ptr<Engine> engine = make_engine(subject, flats, {comm, nullptr});
  const int before = fake_nccl_count("ncclAllReduce");
  engine->begin_round();
  engine->mark_ready(0);
  engine->mark_ready(1);
  expect(until([&] { return fake_nccl_count("ncclAllReduce") > before; }), "no call was made");
  void* const stream = fake_nccl_last_stream();
  expect(until([&] { return fake_nccl_given(stream) >= 2; }), "no kernel follows a collective");
  std::vector<float> weights(kNumel, 1);
  Step step{weights.data(), flats[0].const_data_ptr<float>()};
  fake_nccl_launch(stream, &Step::run, &step);
  expect(!is_idle(stream), "a collective ended without the other rank");
  ranks[0]->abort("asked for");
  expect(until([&] { return is_idle(stream); }), "an abort did not free the stream");
  for (const float weight : weights) {
    expect(weight != weight, "partial sums of an aborted collective are in the weights");
  }
  const std::string message = message_of_call([&] { engine->settle(); });
  expect(message.find("asked for") != std::string::npos, "settle() said '", message, "'");
}

// An op that leaves what its stream has been given.
class Marked final : public BucketOp {
 public:
  struct Mark {
    std::atomic<bool> is_set = false;
    Clock given{};
  };

  Marked(std::shared_ptr<BucketOp> inner, Mark& mark) : inner_(std::move(inner)), mark_(mark) {}

  void run(at::Tensor& flat, const Round& round) override {
    inner_->run(flat, round);
    mark_.given = Device::instance().recorded(current_stream());
    mark_.is_set = true;
  }
  std::string describe() const override { return inner_->describe(); }

 private:
  const std::shared_ptr<BucketOp> inner_;
  Mark& mark_;
};

enum class Among { kRanks, kNodes };

// The network of one bucket stands still: the codec's kernels and the messages of another one, in
// another lane, go on beside it; among nodes so does what its node does before and after them. This
// is how codec, node and wire overlap on a device.
void lanes_do_not_wait_for_each_others_network(const std::string& library, Among among) {
  const std::vector<Nccl> ranks = connect_two(library);
  const auto comm = std::make_shared<NcclOnStreams>(ranks[0]);
  std::array<Marked::Mark, 2> marks;
  int made = 0;
  Subject subject = subjects().front();
  subject.make = [&](const Place& place) -> std::shared_ptr<BucketOp> {
    const auto in_node = [&](std::shared_ptr<BucketOp> op) -> std::shared_ptr<BucketOp> {
      if (among == Among::kRanks) return op;
      const NodeShare share{.ranks = 2 * kRanks, .nodes = 2, .op = ReduceOp::kSum};
      return std::make_shared<Hierarchical>(loopback(), std::move(op), share);
    };
    Marked::Mark& mark = marks.at(made);
    // The broadcast in the node follows, where the fake device's thread stands still.
    if (made++ == 0)
      return in_node(
          std::make_shared<Marked>(std::make_shared<AllReduce>(comm, ReduceOp::kSum), mark));
    return std::make_shared<Marked>(in_node(std::make_shared<CompressedAllReduce>(
                                        loopback(), codec_on(place.device, "block_uint8"),
                                        std::make_shared<Scratch>(), ReduceOp::kSum)),
                                    mark);
  };
  const std::vector<at::Tensor> flats = make_flats(subject, kFake);
  const std::unique_ptr<Engine> engine = make_engine(subject, flats, {comm, nullptr});
  engine->begin_round();
  for (SlotId slot = 0; slot < 4; ++slot) engine->mark_ready(slot);
  const bool both = until([&] { return marks[0].is_set && marks[1].is_set; });
  expect(both, "a lane waits for the network of another one");
  expect(!Device::instance().query(marks[0].given), "a collective ended without the other rank");
  expect(Device::instance().query(marks[1].given), "a stream waits for another lane's network");
  // On another GPU than the one that the lane's stream, which comes from a pool, counts as.
  const auto lane = reinterpret_cast<int64_t>(fake_nccl_last_stream());
  const OnStream guard(lane / 8 == stream_of(1) / 8 ? stream_of(2) : stream_of(1));
  at::Tensor others = zeros_on(kFake, kNumel);
  ranks[1]->all_reduce(others, ReduceOp::kSum);
  engine->wait();
  synchronize(kFake);
  expect_no_race("two lanes");
}

// Two communicators whose kernels wait on each rank's GPU for one that does not run on the other's.
void communicators_are_aborted_together(const std::string& library) {
  const std::vector<Nccl> first = connect_two(library), second = connect_two(library);
  at::Tensor tensor = zeros_on(kFake, 4);
  const auto call = [&](const Nccl& comm, int rank, int stream) {
    const OnStream guard(stream_of(rank, stream));
    comm->all_reduce(tensor, ReduceOp::kSum);
  };
  for (int rank = 0; rank < 2; ++rank) {
    call((rank == 0 ? first : second)[rank], rank, 2 + rank);
    call((rank == 0 ? second : first)[rank], rank, 3 - rank);
  }
  expect(!is_idle(handle_of(stream_of(0, 2))), "a device ran two communicators' kernels");
  const Subject subject = subjects().front();
  const std::vector<at::Tensor> flats = make_flats(subject, kFake);
  for (int rank = 0; rank < 2; ++rank) {
    const auto& behind = rank == 0 ? second : first;
    const auto& ahead = rank == 0 ? first : second;
    const std::unique_ptr<Engine> engine = make_engine(subject, flats, {behind[rank], ahead[rank]});
    engine->abort("asked for");
  }
}

void expect_no_misuse_of_nccl() {
  const std::string misuse = fake_nccl_misuse();
  expect(misuse.empty(), misuse);
}

}  // namespace
}  // namespace bagua::fake
