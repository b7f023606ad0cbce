// Ranks of a schedule: threads of one process, each with a separate engine.
#pragma once

#include <algorithm>
#include <atomic>
#include <functional>
#include <memory>
#include <string>
#include <thread>
#include <vector>

#include <ATen/core/Tensor.h>
#include <ATen/ops/empty.h>

#include "engine/engine.h"
#include "op/all_reduce.h"
#include "op/compressed_all_reduce.h"
#include "stress/plan.h"

namespace bagua::stress {

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
  RankEngine(const World& world, int rank, const Disturbance& disturbance = nullptr,
             uint64_t fingerprint = 1)
      : world_(world), rank_(rank) {
    std::vector<Lane> lanes(world.lanes);
    std::vector<std::shared_ptr<Scratch>> scratch;
    for (int i = 0; i < world.lanes; ++i) {
      lanes[i].communicators = {world.connect(world.places[i], rank)};
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
    engine_ = std::make_unique<Engine>(std::move(lanes),
                                       EngineOptions{.name = "stress",
                                                     .fingerprint = fingerprint,
                                                     .incarnation = 2,
                                                     .timeout = world.timeout,
                                                     .control = world.connect(world.control, rank),
                                                     .board = board});
  }

  Engine& engine() { return *engine_; }
  const std::vector<at::Tensor>& flats() const { return flats_; }

  void begin() {
    engine_->begin_round();
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
        for (size_t i = half; i < order.size(); ++i) mark_one(order[i]);
      } catch (...) {
        error = std::current_exception();
      }
    });
    try {
      for (size_t i = 0; i < half; ++i) mark_one(order[i]);
    } catch (...) {
      other.join();
      throw;
    }
    other.join();
    if (error) std::rethrow_exception(error);
  }

 private:
  void mark_one(SlotId slot) {
    world_.point();
    expect(engine_->mark_ready(slot), "slot ", slot, " had been marked in this round already");
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
