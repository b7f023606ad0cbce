// Runs the engine and its ops on tensors of a fake device, finds work that no event orders, and
// compares the results with the CPU's. A library that tests/deep/test_device_streams.py runs.
#include <atomic>
#include <functional>
#include <iostream>
#include <limits>
#include <memory>
#include <thread>

#include <ATen/core/grad_mode.h>
#include <ATen/ops/allclose.h>
#include <dlfcn.h>

#include "codec/cuda/chunk_codec_cuda.h"
#include "comm/host_communicator.h"
#include "device_streams/device_weights.h"
#include "device_streams/host_memory_communicator.h"
#include "device_streams/nccl_on_streams.h"
#include "device_streams/subjects.h"
#include "device_work/device_work.h"
#include "engine/jobs.h"
#include "op/async_average.h"

namespace bagua::fake {
namespace {

// Three rounds, slots filled under two streams; the last result.
at::Tensor train(const Subject& subject, at::Device device) {
  const std::vector<at::Tensor> flats = make_flats(subject, device);
  const std::unique_ptr<Engine> made = make_engine(subject, flats);
  Engine& engine = *made;
  for (int64_t round = 1; round <= 3; ++round) {
    engine.begin_round();
    for (SlotId slot = 3; slot >= 0; --slot) {
      // The second slot of a bucket is filled first, on another stream, which the caller's does not
      // wait for.
      const int64_t half = slot % 2, other = 60;
      const at::Tensor half_gradient = gradient(round).narrow(0, half * kNumel / 2, kNumel / 2);
      const auto fill = [&] {
        flats[slot / 2].narrow(0, half * kNumel / 2, kNumel / 2).copy_(half_gradient);
        engine.mark_ready(slot);
      };
      if (half == 0 || device.is_cpu()) {
        fill();
        continue;
      }
      c10::Event caller(kFake.type());
      caller.record(Guard::stream(current_stream()));
      const OnStream guard(other);
      caller.block(Guard::stream(other));
      fill();
    }
    engine.wait();
    for (const at::Tensor& flat : flats) flat.mul_(0.5);  // the optimizer
  }
  return flats[1].to(at::kCPU);
}

void detector_finds_what_is_missing() {
  at::Tensor x = zeros_on(kFake, 100);
  {
    const OnStream guard(1);
    x.add_(1);
  }
  expect(!Device::instance().take_races().empty(), "an unordered write was not found");
  synchronize(kFake);
  c10::Event written(kFake.type());
  {
    const OnStream guard(1);
    x.add_(1);
    written.record(Guard::stream(1));
  }
  {
    const OnStream guard(2);
    written.block(Guard::stream(2));
    x.add_(1);
  }
  expect_no_race("a stream that has waited");
  x.reset();
  expect(!Device::instance().take_races().empty(), "memory freed too early was not found");
  at::Tensor y = zeros_on(kFake, 100), z;
  {
    const OnStream guard(3);
    synchronize(kFake);
    z = y.add(1);
    expect(z.cpu().sum().item<float>() == 100.0f, "wrong values");
  }
  expect_no_race("a synchronised device");
}

void ops_agree_with_the_cpu() {
  for (const Subject& subject : subjects()) {
    const at::Tensor expected = train(subject, at::kCPU);
    const at::Tensor found = train(subject, kFake);
    expect_no_race(subject.name);
    const bool same = subject.tolerance == 0
                          ? found.equal(expected)
                          : at::allclose(found, expected, subject.tolerance, subject.tolerance);
    expect(same, subject.name, ": the device's result is not the CPU's");
    std::cout << subject.name << std::endl;
  }
}

// A device may be a whole step behind its host: nothing in a step waits for what the step gave it.
void hosts_do_not_wait_for_their_step() {
  for (const Subject& subject : subjects()) {
    const std::vector<at::Tensor> flats = make_flats(subject, kFake);
    const std::unique_ptr<Engine> engine = make_engine(subject, flats);
    for (int round = 1; round <= 3; ++round) {
      if (round == 3) Device::instance().fall_behind();
      for (const at::Tensor& flat : flats) flat.add_(round);
      engine->begin_round();
      engine->mark_all();
      engine->wait();
    }
    const int64_t waits = Device::instance().host_waits();
    expect(waits == 0, subject.name, ": ", waits, " waits for the device in a step");
  }
}

// Damages the indices of one rank's message.
class DamagingCommunicator final : public LoopbackCommunicator {
 public:
  using LoopbackCommunicator::LoopbackCommunicator;
  void all_gather(const at::Tensor& input, at::Tensor& output) override {
    LoopbackCommunicator::all_gather(input, output);
    if (output.numel() > 1000) output.view({group().size, -1})[1].narrow(0, -500, 500).fill_(255);
  }
};

void damaged_indices_are_found_a_round_later() {
  Sparse op(std::make_shared<DamagingCommunicator>(kRanks), std::make_shared<Scratch>(), kNumel,
            500, memory({zeros_on(kFake, kNumel), at::zeros({1}, at::kLong)}),
            noting_sparse_options());
  at::Tensor flat = gradient(1).to(kFake);
  op.run(flat, {.number = 1, .grad_scale = 1, .bucket = "b"});
  expect(!flat.cpu().isfinite().all().item<bool>(), "damaged indices were summed");
  const std::string message =
      message_of_call([&] { op.run(flat, {.number = 2, .grad_scale = 1, .bucket = "b"}); });
  expect(message.find("bucket 'b': the payload from rank 1 was corrupted") != std::string::npos,
         "damaged indices: '", message, "'");
}

void sparse_messages_need_kernels() {
  if (has_cuda_codecs()) return;
  Sparse op(loopback(), std::make_shared<Scratch>(), kNumel, 500,
            memory({zeros_on(kFake, kNumel), at::zeros({1}, at::kLong)}), {});
  at::Tensor flat = gradient(1).to(kFake);
  const std::string message =
      message_of_call([&] { op.run(flat, {.number = 1, .grad_scale = 1, .bucket = "b"}); });
  expect(message.find("the codec of sparse messages has no CUDA kernels") != std::string::npos,
         "without kernels: '", message, "'");
}

// Infinity passes through every op to the result, and no memory changes.
void what_is_not_finite_is_seen_without_waiting() {
  for (const std::string name :
       {"low rank Float", "low rank by ATen Float", "sparse Float", "error feedback Float"}) {
    bool found = false;
    for (const Subject& subject : subjects()) {
      if (subject.name != name) continue;
      found = true;
      const std::vector<at::Tensor> flats = make_flats(subject, kFake);
      const std::unique_ptr<Engine> engine = make_engine(subject, flats);
      const std::vector<at::Tensor> plain = make_flats(subject, kFake);
      const std::unique_ptr<Engine> never = make_engine(subject, plain);
      const auto round = [](Engine& running, const std::vector<at::Tensor>& buckets, float bad) {
        for (const at::Tensor& flat : buckets) flat.copy_(gradient(3).to(kFake));
        buckets[1].narrow(0, 5, 1).mul_(bad);
        running.begin_round();
        running.mark_all();
        running.wait();
      };
      round(*engine, flats, std::numeric_limits<float>::infinity());
      expect(!flats[1].cpu().isfinite().all().item<bool>(), name, ": infinity was lost");
      round(*engine, flats, 1);
      round(*never, plain, 1);
      expect(flats[1].cpu().equal(plain[1].cpu()), name, ": a round that was not finite counts");
    }
    expect(found, "no subject is '", name, "'");
  }
}

// Means of so few elements that the last ranks have empty parts, on ranks that are threads. Two
// rounds: on a device the frames of a round are compared in the next one.
std::vector<at::Tensor> means_with_empty_parts(at::Device device, int64_t numel) {
  const auto hub = std::make_shared<ThreadHub>(kRanks, std::chrono::seconds(20));
  std::vector<at::Tensor> results(kRanks);
  std::vector<std::string> errors(kRanks);
  std::vector<std::thread> threads;
  for (int rank = 0; rank < kRanks; ++rank) {
    threads.emplace_back([&, rank] {
      const at::NoGradGuard no_grad;
      const OnStream guard(20 + rank);
      const auto comm = std::make_shared<ThreadCommunicator>(hub, rank);
      try {
        CompressedAllReduce op(comm, codec_on(device, "block_uint8"), std::make_shared<Scratch>(),
                               ReduceOp::kAvg, Checksum::kOn);
        at::Tensor flat = gradient(rank + 1).narrow(0, 0, numel).clone().to(device);
        for (int64_t round = 1; round <= 2; ++round) {
          op.run(flat, {.number = round, .grad_scale = 1, .bucket = "small"});
        }
        results[rank] = flat.cpu();
      } catch (const std::exception& error) {
        errors[rank] = error.what();
        comm->abort(errors[rank]);
      }
    });
  }
  for (std::thread& thread : threads) thread.join();
  for (const std::string& error : errors) expect(error.empty(), error);
  return results;
}

void empty_parts_send_no_frames() {
  for (const int64_t numel : {1, 32}) {
    const std::vector<at::Tensor> expected = means_with_empty_parts(at::kCPU, numel);
    const std::vector<at::Tensor> found = means_with_empty_parts(kFake, numel);
    for (int rank = 0; rank < kRanks; ++rank) {
      expect(found[rank].equal(expected[0]), "rank ", rank, ": another mean than on the CPU");
    }
    expect_no_race("empty parts");
  }
}

// An engine that is dropped in a round has given its lanes work that nobody waits for.
void memory_of_an_unfinished_round_is_not_freed_too_early() {
  const Subject subject = subjects().front();
  std::vector<at::Tensor> flats = make_flats(subject, kFake);
  std::unique_ptr<Engine> engine = make_engine(subject, flats);
  engine->begin_round();
  for (SlotId slot = 0; slot < 4; ++slot) engine->mark_ready(slot);
  while (engine->stats().buckets.back().rounds == 0) std::this_thread::yield();
  engine.reset();
  flats.clear();
  expect_no_race("an engine dropped in a round");
}

// Can be aborted while its work is on a stream: from then on tensors hold partial sums.
class AbortableCommunicator final : public LoopbackCommunicator {
 public:
  using LoopbackCommunicator::LoopbackCommunicator;
  void all_reduce(at::Tensor& tensor, ReduceOp op) override {
    LoopbackCommunicator::all_reduce(tensor, op);
    if (breaks_) aborted_ = true;
  }
  void check() override {
    if (aborted_) throw TransportError("an earlier call failed");
  }
  void invalidate_if_aborted(at::Tensor& result) override {
    if (aborted_) result.fill_(std::numeric_limits<float>::quiet_NaN());
  }
  void break_next() { breaks_ = true; }
  void break_now() { aborted_ = true; }

 private:
  bool breaks_ = false;
  std::atomic<bool> aborted_ = false;
};

void results_of_an_aborted_collective_are_not_used() {
  for (const std::string call : {"wait", "begin_round", "settle"}) {
    const auto comm = std::make_shared<AbortableCommunicator>(kRanks);
    Subject subject = subjects().front();
    subject.make = [&](const Place&) { return std::make_shared<AllReduce>(comm, ReduceOp::kAvg); };
    const std::vector<at::Tensor> flats = make_flats(subject, kFake);
    const std::unique_ptr<Engine> engine = make_engine(subject, flats, {comm, nullptr});
    const auto round = [&] {
      engine->begin_round();
      engine->mark_all();
      engine->wait();
    };
    round();
    if (call == "wait") {
      comm->break_next();
    } else {
      comm->break_now();
    }
    const auto called = [&] { call == "settle" ? engine->settle() : round(); };
    const std::string message = message_of_call(called);
    expect(message.find("an earlier call failed") != std::string::npos, call, " said '", message,
           "'");
    const bool is_nan = flats[0].isnan().all().item<bool>();
    expect(is_nan == (call == "wait"), call, ": partial sums stay in the bucket");
    engine->settle();  // says nothing twice
  }
}

void jobs_of_an_aborted_communicator_are_not_used() {
  const auto inner = std::make_shared<AbortableCommunicator>(kRanks);
  const auto comm = std::make_shared<CountingCommunicator>(inner);
  const auto alone = std::make_shared<ThreadHub>(1, std::chrono::seconds(20));
  const auto control =
      std::make_shared<CountingCommunicator>(std::make_shared<ThreadCommunicator>(alone, 0));
  DynamicLane lane({.name = "m", .control = control, .ops = {comm}}, /*incarnation=*/1);
  const auto plan = std::make_shared<JobPlan>(
      JobPlan{.name = "b",
              .description = "mean",
              .ops = {std::make_shared<AllReduce>(comm, ReduceOp::kAvg)}});
  at::Tensor flat = gradient(1).to(kFake);
  lane.post({.plan = plan, .flat = flat, .round = 1})->wait();
  expect(flat.isfinite().all().item<bool>(), "a healthy job is not finite");
  inner->break_next();
  lane.post({.plan = plan, .flat = flat, .round = 2})->wait();
  expect(flat.isnan().all().item<bool>(), "partial sums stay in the tensor of a job");
  const std::string message = message_of_call([&] { lane.check(); });
  expect(message.find("an earlier call failed") != std::string::npos, "check() said '", message,
         "'");
  expect_no_race("jobs of a dynamic lane");
}

// Rounds and jobs, before anything is on a stream.
void captures_are_refused() {
  void* const driver = dlopen("libcuda.so.1", RTLD_NOW | RTLD_NOLOAD);
  const auto capture = reinterpret_cast<void (*)(int)>(dlsym(driver, "fake_driver_capture"));
  const Subject subject = subjects().front();
  const std::vector<at::Tensor> flats = make_flats(subject, kFake);
  const std::unique_ptr<Engine> engine = make_engine(subject, flats);
  capture(1);
  const std::string message = message_of_call([&] { engine->begin_round(); });
  expect(message.find("a CUDA graph is being captured") != std::string::npos,
         "begin_round() said '", message, "'");
  capture(0);
  engine->begin_round();
  engine->mark_all();
  engine->wait();
}

void asynchronous_averaging_keeps_out_of_training() {
  at::Tensor weights = gradient(1).to(kFake);
  auto gate = std::make_shared<WeightGate>();
  AsyncAverage op(loopback(), {weights}, gate);
  weights.add_(1);
  op.training_leaves();
  {
    const OnStream guard(7);
    expect(op.run(false) == PeriodicOp::Made::kAverage, "the round was not made");
  }
  op.training_enters();
  weights.add_(1);
  expect_no_race("asynchronous averaging");
}

// The flag of an aborted all-reduce is this rank's own: that a rank wants to pause says nothing of
// the others.
void asynchronous_averaging_does_not_pause_after_an_abort() {
  const auto comm = std::make_shared<AbortableCommunicator>(kRanks);
  AsyncAverage op(comm, {gradient(1).to(kFake)}, std::make_shared<WeightGate>());
  const OnStream guard(7);
  expect(op.run(true) == PeriodicOp::Made::kNothing, "a healthy pause was refused");
  comm->break_next();
  const std::string message = message_of_call([&] { op.run(true); });
  expect(message.find("an earlier call failed") != std::string::npos, "the pause said '", message,
         "'");
}

void host_memory_waits_for_the_device() {
  HostCommunicator comm(std::make_shared<HostMemoryCommunicator>(kRanks, std::vector{10, 11}));
  const at::Tensor brought = gradient(1);
  for (const int64_t stream : {10, 11, 10}) {
    const OnStream guard(stream);
    at::Tensor sum = brought.to(kFake).mul_(2), gathered = zeros_on(kFake, kRanks * kNumel);
    comm.all_reduce(sum, ReduceOp::kSum);
    expect(sum.cpu().equal(brought.mul(2 * kRanks)), "all_reduce");
    comm.all_gather(sum.mul_(2), gathered);
    if (const OnStream other(21 - stream); true) {
      comm.exchange({}, {{zeros_on(kFake, 8), 1}}, [](size_t) {});
    }
    expect(gathered.narrow(0, kNumel, kNumel).cpu().equal(sum.cpu()), "all_gather");
  }
  expect_no_race("a transport of host memory");
}

}  // namespace
}  // namespace bagua::fake

// nccl_library: the path of the fake NCCL, which is preloaded; null: there is none. 0: all is well;
// otherwise a message is on standard error.
extern "C" int device_streams(const char* nccl_library) {
  using namespace bagua::fake;
  const at::NoGradGuard no_grad;
  try {
    detector_finds_what_is_missing();
    ops_agree_with_the_cpu();
    empty_parts_send_no_frames();
    hosts_do_not_wait_for_their_step();
    damaged_indices_are_found_a_round_later();
    sparse_messages_need_kernels();
    what_is_not_finite_is_seen_without_waiting();
    memory_of_an_unfinished_round_is_not_freed_too_early();
    results_of_an_aborted_collective_are_not_used();
    jobs_of_an_aborted_communicator_are_not_used();
    captures_are_refused();
    asynchronous_averaging_keeps_out_of_training();
    asynchronous_averaging_does_not_pause_after_an_abort();
    if (nccl_library) {
      asynchronous_averaging_waits_for_ranks_outside_the_gate(nccl_library);
      partial_sums_do_not_reach_the_weights(nccl_library);
      lanes_do_not_wait_for_each_others_network(nccl_library, Among::kRanks);
      lanes_do_not_wait_for_each_others_network(nccl_library, Among::kNodes);
      communicators_are_aborted_together(nccl_library);
      expect_no_misuse_of_nccl();
    }
    host_memory_waits_for_the_device();
    weights_are_compared_later(kFake);
  } catch (const std::exception& error) {
    const auto* from_torch = dynamic_cast<const c10::Error*>(&error);
    std::cerr << (from_torch ? from_torch->what_without_backtrace() : error.what()) << std::endl;
    return 1;
  }
  return 0;
}
