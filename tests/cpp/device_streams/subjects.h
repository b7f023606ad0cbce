// The ops that the tests of streams run, and an engine for each.
#pragma once

#include <functional>
#include <memory>
#include <string>
#include <vector>

#include <ATen/ops/arange.h>
#include <ATen/ops/full.h>
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
#include "op/hierarchical.h"
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

// A rank's communicator, and its bucket: where, and how many elements.
struct Place {
  std::shared_ptr<Communicator> communicator;
  at::Device device;
  int64_t numel;

  Group group() const { return communicator->group(); }
};

// An op, and its bucket of two slots.
struct Subject {
  std::string name;
  at::ScalarType dtype;
  double tolerance;  // 0: the same bits as on CPU
  std::function<std::shared_ptr<BucketOp>(const Place&)> make;
  std::string work;  // its name where its work is counted; empty: it is not
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

at::Tensor counter() { return at::zeros({1}, at::kLong); }

// Zeros in float32 beside a bucket.
at::Tensor zeros_at(const Place& place, int64_t numel) { return zeros_on(place.device, numel); }

std::shared_ptr<NeighborAverage> complete_graph(const Place& place) {
  std::vector<MixingTerm> terms;
  const auto [own, size] = place.group();
  for (int other = 0; other < size; ++other) {
    if (other != own) terms.push_back({other, 1.0 / size});
  }
  return std::make_shared<NeighborAverage>(place.communicator, 1.0 / size, terms,
                                           std::make_shared<Scratch>());
}

// Of vectors, and one matrix.
std::shared_ptr<UpdateMomentum> momentum_of_slots(const Place& place) {
  constexpr int64_t kSlots = 50;
  const int64_t numel = place.numel / kSlots;
  std::vector<SlotMomentum> slots;
  for (int64_t slot = 0; slot < kSlots; ++slot) {
    const at::Tensor memory = at::full({numel}, 0.1 * static_cast<double>(slot)).to(place.device);
    slots.push_back({memory, slot * numel, {1}});
  }
  slots[1] = {slots[1].memory.narrow(0, 0, 600).view({20, 30}), numel, {1, 20}};
  return std::make_shared<UpdateMomentum>(std::move(slots), at::full({kSlots}, 0.9, at::kDouble),
                                          std::make_shared<Scratch>());
}

// Blocks of two matrices and two vectors, as of a transformer: matrices of one shape are at equal
// distances.
std::vector<LowRankMatrix> blocks(int64_t numel) {
  constexpr int64_t kMatrix = 40000, kFirstVector = 200, kSecondVector = 100, kRank = 2;
  std::vector<LowRankMatrix> matrices;
  int64_t at = 0;
  while (at + 2 * kMatrix + kFirstVector + kSecondVector <= numel) {
    matrices.push_back({at, 200, 200, kRank});
    matrices.push_back({at + kMatrix + kFirstVector, 100, 400, kRank});
    at += 2 * kMatrix + kFirstVector + kSecondVector;
  }
  return matrices;
}

std::shared_ptr<LowRank> low_rank(const Place& place, const std::vector<LowRankMatrix>& matrices,
                                  bool error_feedback, bool has_kernels) {
  int64_t queries = 0;
  for (const LowRankMatrix& m : matrices) queries += m.columns * m.rank;
  const at::Tensor first = at::arange(queries, at::kFloat).mul_(0.01).sin_().to(place.device);
  LowRankOptions options{.warm_start = true, .error_feedback = error_feedback, .seed = 7};
  if (has_kernels) options.kernels = std::make_shared<NotingLowRank>();
  return std::make_shared<LowRank>(
      place.communicator, std::make_shared<Scratch>(), place.numel, matrices, options,
      memory({zeros_at(place, error_feedback ? place.numel : 0), first, counter()}));
}

std::vector<Subject> subjects() {
  std::vector<Subject> all;
  const auto add = [&](const std::string& name, at::ScalarType dtype, auto make,
                       const std::string& work = "") {
    all.push_back(
        {name + " " + c10::toString(dtype), dtype, 0, make, dtype == at::kFloat ? work : ""});
  };
  add(
      "all_reduce", at::kFloat,
      [](const Place& place) {
        return std::make_shared<AllReduce>(place.communicator, ReduceOp::kAvg);
      },
      "all_reduce");
  for (const std::string& name : codec_names()) {
    for (const at::ScalarType dtype : {at::kFloat, at::kHalf, at::kDouble}) {
      add(
          name, dtype,
          [=](const Place& place) {
            return std::make_shared<CompressedAllReduce>(
                place.communicator, codec_on(place.device, name), std::make_shared<Scratch>(),
                ReduceOp::kAvg, static_cast<Checksum>(dtype == at::kHalf));
          },
          "compressed_all_reduce " + name);
    }
    for (const at::ScalarType dtype : {at::kFloat, at::kBFloat16, at::kDouble}) {
      add(
          "gossip of " + name, dtype,
          [=](const Place& place) {
            const auto replica = [&] { return zeros_at(place, place.numel); };
            return std::make_shared<CompressedGossip>(
                place.communicator, codec_on(place.device, name), std::make_shared<Scratch>(),
                Replicas{replica(), replica(), replica()}, MixingWeights{1.0 / 3, 1.0 / 3},
                static_cast<Checksum>(dtype == at::kBFloat16));
          },
          "compressed_gossip " + name);
    }
    for (const at::ScalarType dtype : {at::kFloat, at::kHalf}) {
      add(
          name + " with error feedback", dtype,
          [=](const Place& place) {
            const auto residuals = memory({zeros_at(place, place.numel), counter(),
                                           zeros_at(place, place.numel / place.group().size)});
            return std::make_shared<CompressedAllReduce>(
                place.communicator, codec_on(place.device, name), std::make_shared<Scratch>(),
                ReduceOp::kAvg, Checksum::kOff,
                TwoResiduals{.memory = residuals, .padding = dtype == at::kHalf ? 5 : 0});
          },
          name == "minmax_uint8" || name == "int4_block"
              ? "compressed_all_reduce " + name + " with residuals"
              : "");
    }
    for (const at::ScalarType dtype : {at::kFloat, at::kBFloat16}) {
      add(
          "reduce-scatter of " + name, dtype,
          [=](const Place& place) {
            return std::make_shared<CompressedReduceScatter>(
                place.communicator, codec_on(place.device, name), std::make_shared<Scratch>(), 3.0,
                nullptr, static_cast<Checksum>(dtype == at::kBFloat16));
          },
          "compressed_reduce_scatter " + name);
    }
    add("reduce-scatter with error feedback of " + name, at::kHalf, [=](const Place& place) {
      return std::make_shared<CompressedReduceScatter>(
          place.communicator, codec_on(place.device, name), std::make_shared<Scratch>(), 3.0,
          memory({zeros_at(place, place.numel), counter()}));
    });
    add("payloads in a node of " + name, at::kFloat, [=](const Place& place) {
      const auto codec = codec_on(place.device, name);
      const auto scratch = std::make_shared<Scratch>();
      const auto between =
          std::make_shared<CompressedAllReduce>(place.communicator, codec, scratch, ReduceOp::kAvg);
      const NodeShare share{.ranks = 2 * kRanks, .nodes = kRanks, .op = ReduceOp::kAvg};
      return std::make_shared<Hierarchical>(loopback(), between, share,
                                            ResultPayloads{codec, scratch});
    });
    add("all-gather of " + name, at::kFloat, [=](const Place& place) {
      return std::make_shared<CompressedAllGather>(place.communicator, codec_on(place.device, name),
                                                   std::make_shared<Scratch>(), Checksum::kOn);
    });
  }
  for (const at::ScalarType dtype : {at::kFloat, at::kHalf}) {
    add(
        "sharded hierarchical", dtype,
        [](const Place& place) {
          const auto [rank, size] = place.group();
          std::vector<std::shared_ptr<BucketOp>> shares(size);
          shares[rank] = std::make_shared<AllReduce>(place.communicator, ReduceOp::kAvg);
          return std::make_shared<ShardedHierarchical>(
              place.communicator, std::move(shares), std::make_shared<Scratch>(),
              NodeShare{.ranks = 2 * size + 1, .nodes = 2, .op = ReduceOp::kAvg},
              place.device.is_cpu() ? nullptr : std::make_shared<NotingPlainSum>());
        },
        "sharded_hierarchical");
    add(
        "gossip", dtype,
        [](const Place& place) {
          std::vector<int> node_sizes;
          for (int node = place.group().size; node > 0; --node) node_sizes.push_back(node);
          return std::make_shared<Gossip>(place.communicator, counter(), node_sizes,
                                          std::make_shared<Scratch>());
        },
        "gossip");
    add("neighbor average", dtype, complete_graph, "neighbor_average");
  }
  add("average weights", at::kFloat, [](const Place& place) {
    auto inner = std::make_shared<AllReduce>(place.communicator, ReduceOp::kAvg);
    return std::make_shared<AverageWeights>(zeros_at(place, place.numel), counter(), inner);
  });
  add("momentum", at::kFloat, momentum_of_slots, "update_momentum");
  for (const Checksum checksum : {Checksum::kOff, Checksum::kOn}) {
    add(
        checksum == Checksum::kOn ? "sparse with a checksum" : "sparse", at::kFloat,
        [=](const Place& place) {
          return std::make_shared<Sparse>(
              place.communicator, std::make_shared<Scratch>(), place.numel, place.numel / 100,
              memory({zeros_at(place, place.numel), counter()}), noting_sparse_options(checksum));
        },
        checksum == Checksum::kOn ? "" : "sparse");
  }
  add("error feedback", at::kFloat, [](const Place& place) {
    return std::make_shared<ErrorFeedbackAllReduce>(
        place.communicator, std::make_shared<Scratch>(), place.numel,
        memory({gradient(9).to(place.device), counter()}));
  });
  // Three matrices of equal shape at equal distances, two closer, and others in between.
  const std::vector<LowRankMatrix> several{
      {0, 100, 50, 2},     {5000, 30, 20, 1},   {10000, 100, 50, 2}, {20000, 100, 50, 2},
      {26000, 100, 50, 2}, {32000, 100, 60, 2}, {38100, 30, 20, 1},  {kNumel - 5100, 100, 50, 2}};
  for (const bool has_kernels : {true, false}) {
    const std::string by = has_kernels ? "" : " by ATen";
    const auto add_low_rank = [&](const std::string& name, at::ScalarType dtype, double tolerance,
                                  auto make_matrices, bool error_feedback) {
      add(
          name + by, dtype,
          [=](const Place& place) {
            return low_rank(place, make_matrices(place.numel), error_feedback, has_kernels);
          },
          has_kernels && name == "low rank" ? "low_rank" : "");
      all.back().tolerance = tolerance;
    };
    const auto of_several = [several](int64_t) { return several; };
    const auto of_none = [](int64_t) { return std::vector<LowRankMatrix>{}; };
    add_low_rank("low rank", at::kFloat, 1e-4, blocks, true);
    add_low_rank("low rank of several", at::kHalf, 1e-3, of_several, true);
    add_low_rank("low rank without error feedback", at::kFloat, 1e-4, of_several, false);
    add_low_rank("low rank of none", at::kFloat, 0, of_none, true);
  }
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
    bucket.ops.push_back(subject.make({loopback(), flats[i].device(), kNumel}));
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
