// Ranks for the stress program: threads of one process, each with an engine of its own.
#pragma once

#include <algorithm>
#include <atomic>
#include <chrono>
#include <cmath>
#include <functional>
#include <memory>
#include <random>
#include <stdexcept>
#include <string>
#include <thread>
#include <vector>

#include <ATen/core/Tensor.h>
#include <ATen/ops/empty.h>
#include <torch/csrc/distributed/c10d/HashStore.hpp>

#include "base/check.h"
#include "codec/factory.h"
#include "comm/thread_communicator.h"
#include "engine/engine.h"
#include "op/all_reduce.h"
#include "op/compressed_all_reduce.h"

namespace bagua::stress {

using std::chrono::milliseconds;
using Random = std::mt19937_64;

inline int between(Random& random, int low, int high) {
  return std::uniform_int_distribution<int>(low, high)(random);
}

// What the program looks for: something that should hold did not.
class Broken final : public std::logic_error {
  using std::logic_error::logic_error;
};

template <typename... Args>
void expect(bool condition, const Args&... what) {
  if (!condition) throw Broken(concat(what...));
}

struct BucketPlan {
  std::vector<int64_t> slots;  // elements of each
  std::string codec;           // empty: exact
  ReduceOp op;
  int64_t numel() const {
    int64_t total = 0;
    for (const int64_t slot : slots) total += slot;
    return total;
  }
};

// The hubs and the store in which the ranks meet, and a plan drawn at random, equal on all ranks.
struct World {
  World(Random& random, int least_ranks, milliseconds engine_timeout)
      : ranks(between(random, least_ranks, 4)),
        lanes(between(random, 1, 3)),
        timeout(engine_timeout),
        control(std::make_shared<ThreadHub>(ranks, kHubTimeout)),
        store(c10::make_intrusive<c10d::HashStore>()) {
    for (int i = 0; i < lanes; ++i) hubs.push_back(std::make_shared<ThreadHub>(ranks, kHubTimeout));
    const std::vector<std::string> codecs = codec_names();
    for (int i = between(random, 1, 5); i > 0; --i) {
      BucketPlan bucket;
      for (int slot = between(random, 1, 6); slot > 0; --slot) {
        bucket.slots.push_back(between(random, 1, between(random, 0, 9) == 0 ? 200000 : 3000));
      }
      const int codec = between(random, -1, static_cast<int>(codecs.size()) - 1);
      if (codec >= 0) bucket.codec = codecs[codec];
      bucket.op = between(random, 0, 1) ? ReduceOp::kAvg : ReduceOp::kSum;
      buckets.push_back(std::move(bucket));
    }
  }

  // Longer than any engine's: it is the engine's own deadline that is tried here.
  static constexpr milliseconds kHubTimeout{20000};

  int ranks;
  int lanes;
  milliseconds timeout;
  std::vector<BucketPlan> buckets;
  std::shared_ptr<ThreadHub> control;
  std::vector<std::shared_ptr<ThreadHub>> hubs;  // one per lane
  c10::intrusive_ptr<c10d::HashStore> store;
};

// What rank `rank` brings in round `round`: within [-1, 1], different everywhere.
inline float value_of(int rank, int64_t round, size_t bucket, int64_t i) {
  const int64_t mixed = i * 37 + rank * 101 + round * 53 + static_cast<int64_t>(bucket) * 17;
  return static_cast<float>(mixed % 257 - 128) / 128.0f;
}

inline double tolerance(const BucketPlan& bucket, int ranks) {
  const double scale = bucket.op == ReduceOp::kAvg ? 1.0 : ranks;
  // Two half-steps of a range of at most 2 (4 ranks' sum: 8) in 255 steps.
  if (bucket.codec.ends_with("uint8")) return scale * 1.02 * 2.0 / 255;
  if (bucket.codec == "bf16") return scale * 1.02 / 128;
  return scale * (bucket.codec == "fp16" ? 1.02 / 1024 : 1e-6);
}

// An extra op at the end of every bucket, to disturb one.
using Disturbance = std::function<void(int rank, const Round& round)>;

class DisturbingOp final : public BucketOp {
 public:
  DisturbingOp(int rank, Disturbance disturbance)
      : rank_(rank), disturbance_(std::move(disturbance)) {}
  void run(at::Tensor&, const Round& round) override { disturbance_(rank_, round); }
  std::string describe() const override { return "DisturbingOp"; }

 private:
  int rank_;
  Disturbance disturbance_;
};

// One rank's engine and its buckets' memory.
class RankEngine {
 public:
  RankEngine(const World& world, int rank, const Disturbance& disturbance = nullptr)
      : world_(world), rank_(rank) {
    std::vector<Lane> lanes(world.lanes);
    std::vector<std::shared_ptr<Scratch>> scratch;
    for (int i = 0; i < world.lanes; ++i) {
      lanes[i].communicators = {connect(world.hubs[i])};
      scratch.push_back(std::make_shared<Scratch>());
    }
    for (size_t i = 0; i < world.buckets.size(); ++i) {
      Lane& lane = lanes[i % world.lanes];
      flats_.push_back(at::empty({world.buckets[i].numel()}));
      lane.buckets.push_back(make_bucket(i, lane, scratch[i % world.lanes]));
      if (disturbance) {
        lane.buckets.back().ops.push_back(std::make_shared<DisturbingOp>(rank, disturbance));
      }
    }
    const auto board = std::make_shared<FailureBoard>(world.store, rank, world.ranks);
    engine_ =
        std::make_unique<Engine>(std::move(lanes), EngineOptions{.name = "stress",
                                                                 .fingerprint = 1,
                                                                 .incarnation = 2,
                                                                 .timeout = world.timeout,
                                                                 .control = connect(world.control),
                                                                 .board = board});
  }

  Engine& engine() { return *engine_; }
  const std::vector<at::Tensor>& flats() const { return flats_; }

  void begin() {
    engine_->begin_round(1.0f);
    for (size_t i = 0; i < flats_.size(); ++i) {
      float* values = flats_[i].data_ptr<float>();
      for (int64_t j = 0; j < flats_[i].numel(); ++j) {
        values[j] = value_of(rank_, engine_->round(), i, j);
      }
    }
  }

  // All slots but the last `left_out` of a random order, from one thread or two.
  void mark(Random& random, size_t left_out = 0) {
    std::vector<SlotId> order(engine_->slots());
    for (size_t i = 0; i < order.size(); ++i) order[i] = static_cast<SlotId>(i);
    std::shuffle(order.begin(), order.end(), random);
    order.resize(order.size() - std::min(left_out, order.size()));
    const size_t half = between(random, 0, 1) ? order.size() / 2 : order.size();
    std::exception_ptr error;
    std::thread other([&] {
      try {
        for (size_t i = half; i < order.size(); ++i) engine_->mark_ready(order[i]);
      } catch (...) {
        error = std::current_exception();
      }
    });
    try {
      for (size_t i = 0; i < half; ++i) engine_->mark_ready(order[i]);
    } catch (...) {
      other.join();
      throw;
    }
    other.join();
    if (error) std::rethrow_exception(error);
  }

  void run_round(Random& random) {
    begin();
    mark(random);
    engine_->wait();
  }

 private:
  std::shared_ptr<CountingCommunicator> connect(const std::shared_ptr<ThreadHub>& hub) const {
    return std::make_shared<CountingCommunicator>(std::make_shared<ThreadCommunicator>(hub, rank_));
  }

  Bucket make_bucket(size_t index, const Lane& lane, const std::shared_ptr<Scratch>& scratch) {
    const BucketPlan& plan = world_.buckets[index];
    Bucket bucket{.name = std::to_string(index), .flat = flats_[index], .slots = {}, .ops = {}};
    int64_t offset = 0;
    for (size_t i = 0; i < plan.slots.size(); ++i) {
      bucket.slots.push_back({.name = concat(index, ".", i),
                              .offset = offset,
                              .sizes = {plan.slots[i]},
                              .strides = {1},
                              .adopt = Adopt::kNone,
                              .parameter = {}});
      offset += plan.slots[i];
    }
    if (plan.codec.empty()) {
      bucket.ops.push_back(std::make_shared<AllReduce>(lane.communicators[0], plan.op));
    } else {
      bucket.ops.push_back(std::make_shared<CompressedAllReduce>(
          lane.communicators[0], make_codec(plan.codec), scratch, plan.op));
    }
    return bucket;
  }

  const World& world_;
  int rank_;
  std::vector<at::Tensor> flats_;
  std::unique_ptr<Engine> engine_;
};

// How a rank ended: the message of the bagua::Error that it caught, or nothing.
struct Ending {
  std::string error;
  bool timed_out = false;
};

// Runs `body(rank)` in a thread per rank. What is not a bagua::Error ends the scenario.
inline std::vector<Ending> run_ranks(const World& world, const std::function<void(int)>& body) {
  std::vector<Ending> endings(world.ranks);
  std::vector<std::exception_ptr> broken(world.ranks);
  std::vector<std::thread> threads;
  for (int rank = 0; rank < world.ranks; ++rank) {
    threads.emplace_back([&, rank] {
      try {
        body(rank);
      } catch (const TimeoutError& error) {
        endings[rank] = {error.what(), true};
      } catch (const Error& error) {
        endings[rank] = {error.what(), false};
      } catch (...) {
        broken[rank] = std::current_exception();
      }
    });
  }
  for (std::thread& thread : threads) thread.join();
  for (const auto& error : broken) {
    if (error) std::rethrow_exception(error);
  }
  return endings;
}

}  // namespace bagua::stress
