// The ops that the tests of streams run, and an engine for each.
#pragma once

#include <functional>
#include <memory>
#include <string>
#include <tuple>
#include <vector>

#include <ATen/ops/arange.h>
#include <ATen/ops/tensor.h>
#include <ATen/ops/zeros.h>

#include "codec/factory.h"
#include "comm/counting_communicator.h"
#include "comm/thread_communicator.h"
#include "device_streams/loopback_communicator.h"
#include "device_streams/noting_codec.h"
#include "device_streams/noting_low_rank.h"
#include "device_streams/noting_sparse_codec.h"
#include "engine/engine.h"
#include "fake_device/fake_device_torch.h"
#include "op/all_reduce.h"
#include "op/average_weights.h"
#include "op/compressed_all_reduce.h"
#include "op/compressed_gossip.h"
#include "op/error_feedback_all_reduce.h"
#include "op/gossip.h"
#include "op/low_rank.h"
#include "op/neighbor_average.h"
#include "op/sharded/compressed_all_gather.h"
#include "op/sharded/compressed_reduce_scatter.h"
#include "op/sharded/sharded_hierarchical.h"
#include "op/sparse.h"
#include "op/update_momentum.h"

namespace bagua::fake {
namespace {

constexpr int kRanks = 3;
constexpr int64_t kNumel = 3 * 140000;  // equal parts, each of two pieces
const at::Device kFake(at::kCUDA, 0);

// Everything enqueued inside belongs to stream `id`.
class OnStream {
 public:
  explicit OnStream(int64_t id) : guard_(Guard::stream(id)) {}

 private:
  c10::StreamGuard guard_;
};

// One op on one device, and its bucket of two slots.
struct Subject {
  std::string name;
  at::ScalarType dtype;
  double tolerance;  // 0: the same bits as on CPU
  std::function<std::shared_ptr<BucketOp>(at::Device)> make;
};

at::Tensor zeros_on(at::Device device, int64_t numel, at::ScalarType dtype = at::kFloat) {
  return at::zeros({numel}, at::TensorOptions().dtype(dtype).device(device));
}

std::string message_of_call(const std::function<void()>& call) {
  try {
    call();
  } catch (const Error& error) {
    return error.what();
  }
  return "";
}

std::shared_ptr<Communicator> loopback() { return std::make_shared<LoopbackCommunicator>(kRanks); }

std::shared_ptr<const Codec> codec_on(at::Device device, const std::string& name) {
  if (device.is_cpu()) return make_codec(name);
  return std::make_shared<NotingCodec>(name);
}

std::shared_ptr<RoundMemory> memory(std::vector<at::Tensor> tensors) {
  return std::make_shared<RoundMemory>(std::move(tensors), std::make_shared<RoundOutcome>());
}

// Gradient of round `round`: no two magnitudes are equal, so that there is one top k.
at::Tensor gradient(int64_t round) {
  at::Tensor result = at::zeros({kNumel});
  float* values = result.data_ptr<float>();
  for (int64_t i = 0; i < kNumel; ++i) {
    const int64_t place = (i * 7919 + round * 31) % kNumel + 1;
    values[i] = static_cast<float>(i % 2 ? place : -place) / kNumel;
  }
  return result;
}

std::vector<Subject> subjects() {
  std::vector<Subject> all;
  const auto add = [&](const std::string& name, at::ScalarType dtype, double tolerance, auto make) {
    all.push_back({name, dtype, tolerance, make});
  };
  const auto counter = [] { return at::zeros({1}, at::kLong); };
  add("all_reduce", at::kFloat, 0,
      [](at::Device) { return std::make_shared<AllReduce>(loopback(), ReduceOp::kAvg); });
  for (const std::string& name : codec_names()) {
    for (const at::ScalarType dtype : {at::kFloat, at::kHalf, at::kDouble}) {
      add(name + " " + c10::toString(dtype), dtype, 0, [name, dtype](at::Device device) {
        return std::make_shared<CompressedAllReduce>(loopback(), codec_on(device, name),
                                                     std::make_shared<Scratch>(), ReduceOp::kAvg,
                                                     static_cast<Checksum>(dtype == at::kHalf));
      });
    }
    for (const at::ScalarType dtype : {at::kFloat, at::kBFloat16, at::kDouble}) {
      add("gossip of " + name + " " + c10::toString(dtype), dtype, 0, [name](at::Device device) {
        const Replicas replicas{zeros_on(device, kNumel), zeros_on(device, kNumel),
                                zeros_on(device, kNumel)};
        return std::make_shared<CompressedGossip>(loopback(), codec_on(device, name),
                                                  std::make_shared<Scratch>(), replicas,
                                                  MixingWeights{1.0 / 3, 1.0 / 3}, Checksum::kOn);
      });
    }
  }
  for (const std::string& name : codec_names()) {
    for (const at::ScalarType dtype : {at::kFloat, at::kHalf}) {
      const std::string suffix = std::string(" ") + c10::toString(dtype);
      add(name + " with error feedback" + suffix, dtype, 0, [=](at::Device device) {
        const auto residuals =
            memory({zeros_on(device, kNumel), counter(), zeros_on(device, kNumel / kRanks)});
        return std::make_shared<CompressedAllReduce>(
            loopback(), codec_on(device, name), std::make_shared<Scratch>(), ReduceOp::kAvg,
            Checksum::kOff, TwoResiduals{.memory = residuals, .padding = 5});
      });
    }
    add("reduce-scatter of " + name, at::kFloat, 0, [=](at::Device device) {
      return std::make_shared<CompressedReduceScatter>(loopback(), codec_on(device, name),
                                                       std::make_shared<Scratch>(), 3.0, nullptr,
                                                       Checksum::kOn);
    });
    add("reduce-scatter with error feedback of " + name, at::kHalf, 0, [=](at::Device device) {
      return std::make_shared<CompressedReduceScatter>(
          loopback(), codec_on(device, name), std::make_shared<Scratch>(), 3.0,
          memory({zeros_on(device, kNumel), counter()}));
    });
    add("all-gather of " + name, at::kFloat, 0, [=](at::Device device) {
      return std::make_shared<CompressedAllGather>(loopback(), codec_on(device, name),
                                                   std::make_shared<Scratch>(), Checksum::kOn);
    });
  }
  for (const at::ScalarType dtype : {at::kFloat, at::kHalf}) {
    add(std::string("sharded hierarchical ") + c10::toString(dtype), dtype, 0, [](at::Device) {
      const auto between = std::make_shared<AllReduce>(loopback(), ReduceOp::kAvg);
      return std::make_shared<ShardedHierarchical>(
          loopback(), std::vector<std::shared_ptr<BucketOp>>{between, nullptr, nullptr},
          std::make_shared<Scratch>(), NodeShare{.ranks = 7, .nodes = 2, .op = ReduceOp::kAvg});
    });
  }
  add("average weights", at::kFloat, 0, [=](at::Device device) {
    auto inner = std::make_shared<AllReduce>(loopback(), ReduceOp::kAvg);
    return std::make_shared<AverageWeights>(zeros_on(device, kNumel), counter(), inner);
  });
  for (const at::ScalarType dtype : {at::kFloat, at::kHalf}) {
    const std::string suffix = std::string(" ") + c10::toString(dtype);
    add("gossip" + suffix, dtype, 0, [=](at::Device) {
      return std::make_shared<Gossip>(loopback(), counter(), std::vector<int>{3, 2, 1},
                                      std::make_shared<Scratch>());
    });
    add("neighbor average" + suffix, dtype, 0, [](at::Device) {
      return std::make_shared<NeighborAverage>(loopback(), 0.5,
                                               std::vector<MixingTerm>{{1, 0.2}, {2, 0.3}},
                                               std::make_shared<Scratch>());
    });
  }
  add("momentum", at::kFloat, 0, [](at::Device device) {
    const at::Tensor memory = gradient(5).to(device);
    std::vector<SlotMomentum> slots{{memory.narrow(0, 0, 1000), 0, {1}},
                                    {memory.narrow(0, 1000, 600).view({20, 30}), 1000, {1, 20}}};
    return std::make_shared<UpdateMomentum>(std::move(slots), at::tensor({0.9, 0.3}, at::kDouble),
                                            std::make_shared<Scratch>());
  });
  // Three matrices of equal shape at equal distances, two closer, and others in between.
  const std::vector<LowRankMatrix> several{
      {0, 100, 50, 2},     {5000, 30, 20, 1},   {10000, 100, 50, 2}, {20000, 100, 50, 2},
      {26000, 100, 50, 2}, {32000, 100, 60, 2}, {38100, 30, 20, 1},  {kNumel - 5100, 100, 50, 2}};
  for (const auto& [name, matrices, tolerance] :
       {std::tuple{std::string("low rank"), std::vector<LowRankMatrix>{{0, 400, 500, 2}}, 1e-4},
        std::tuple{std::string("low rank of several"), several, 1e-4},
        std::tuple{std::string("low rank of none"), std::vector<LowRankMatrix>{}, 0.0}}) {
    for (const bool error_feedback : {true, false}) {
      for (const at::ScalarType dtype : {at::kFloat, at::kHalf}) {
        const std::string suffix =
            concat(error_feedback ? " " : " without error feedback ", c10::toString(dtype));
        const bool known = dtype == at::kFloat && error_feedback;
        const double off = dtype == at::kHalf && tolerance > 0 ? 1e-3 : tolerance;
        for (const bool has_kernels : {true, false}) {
          const std::string by = has_kernels ? "" : " by ATen";
          add((known ? name : name + suffix) + by, dtype, off, [=](at::Device device) {
            int64_t queries = 0;
            for (const LowRankMatrix& m : matrices) queries += m.columns * m.rank;
            at::Tensor first = at::arange(queries, at::kFloat).mul_(0.01).sin_().to(device);
            const int64_t errors = error_feedback ? kNumel : 0;
            LowRankOptions options{.warm_start = true, .error_feedback = error_feedback, .seed = 7};
            if (has_kernels) options.kernels = std::make_shared<NotingLowRank>();
            return std::make_shared<LowRank>(loopback(), std::make_shared<Scratch>(), kNumel,
                                             matrices, options,
                                             memory({zeros_on(device, errors), first, counter()}));
          });
        }
      }
    }
  }
  add("sparse", at::kFloat, 0, [=](at::Device device) {
    return std::make_shared<Sparse>(loopback(), std::make_shared<Scratch>(), kNumel, 500,
                                    memory({zeros_on(device, kNumel), counter()}),
                                    noting_sparse_options(Checksum::kOn));
  });
  add("error feedback", at::kFloat, 0, [=](at::Device device) {
    return std::make_shared<ErrorFeedbackAllReduce>(loopback(), std::make_shared<Scratch>(), kNumel,
                                                    memory({gradient(9).to(device), counter()}));
  });
  return all;
}

// Two buckets of two slots each, in two lanes.
std::unique_ptr<Engine> make_engine(const Subject& subject, const std::vector<at::Tensor>& flats,
                                    const std::vector<std::shared_ptr<Communicator>>& of_lanes = {
                                        nullptr, nullptr}) {
  const auto alone = std::make_shared<ThreadHub>(1, std::chrono::seconds(20));
  const auto counting = [&](std::shared_ptr<Communicator> inner = nullptr) {
    if (!inner) inner = std::make_shared<ThreadCommunicator>(alone, 0);
    return std::make_shared<CountingCommunicator>(std::move(inner));
  };
  std::vector<Lane> lanes(2);
  for (int i = 0; i < 2; ++i) {
    Bucket bucket{.name = concat("bucket", i), .flat = flats[i], .slots = {}, .ops = {}};
    for (int64_t slot = 0; slot < 2; ++slot) {
      bucket.slots.push_back(
          {concat("slot", i, "/", slot), slot * kNumel / 2, {kNumel / 2}, {1}, Adopt::kNone, {}});
    }
    bucket.ops.push_back(subject.make(flats[i].device()));
    lanes[i].buckets.push_back(std::move(bucket));
    lanes[i].communicators.push_back(counting(of_lanes[i]));
  }
  return std::make_unique<Engine>(std::move(lanes),
                                  EngineOptions{.name = "m",
                                                .fingerprint = 1,
                                                .incarnation = 1,
                                                .timeout = std::chrono::seconds(20),
                                                .control = counting(),
                                                .board = nullptr});
}

std::vector<at::Tensor> make_flats(const Subject& subject, at::Device device) {
  return {zeros_on(device, kNumel, subject.dtype), zeros_on(device, kNumel, subject.dtype)};
}

}  // namespace
}  // namespace bagua::fake
