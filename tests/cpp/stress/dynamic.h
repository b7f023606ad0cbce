// Dynamic lanes: jobs of all ranks give equal bits, and a failure of one rank ends the wait of all.
#pragma once

#include <memory>
#include <string>
#include <thread>
#include <vector>

#include "engine/jobs.h"
#include "stress/checks.h"

namespace bagua::stress {

// One rank's lane and the plans of its jobs.
class RankLane {
 public:
  RankLane(const World& world, int rank, const Disturbance& disturbance = nullptr)
      : world_(world), rank_(rank) {
    const auto communicator = world.connect(world.places[0], rank);
    const auto scratch = std::make_shared<Scratch>();
    for (size_t i = 0; i < world.buckets.size(); ++i) {
      const BucketPlan& bucket = world.buckets[i];
      JobPlan plan{.name = std::to_string(i), .description = bucket.codec, .ops = {}};
      if (bucket.codec.empty()) {
        plan.ops.push_back(std::make_shared<AllReduce>(communicator, bucket.op));
      } else {
        plan.ops.push_back(std::make_shared<CompressedAllReduce>(
            communicator, make_codec(bucket.codec), scratch, bucket.op));
      }
      if (disturbance) plan.ops.push_back(std::make_shared<DisturbingOp>(rank, disturbance));
      plans_.push_back(std::make_shared<JobPlan>(std::move(plan)));
    }
    lane_ = std::make_unique<DynamicLane>(
        LaneOptions{.name = "stress",
                    .control = world.connect(world.control, rank),
                    .ops = {communicator},
                    .board = std::make_shared<FailureBoard>(world.store, rank, world.ranks)},
        /*incarnation=*/2);
  }

  DynamicLane& lane() { return *lane_; }

  // Posts a job per bucket and waits for them; the tensors by bucket.
  std::vector<at::Tensor> run_round(int64_t round) {
    std::vector<at::Tensor> flats;
    std::vector<DynamicLane::Future> futures;
    for (size_t i = 0; i < plans_.size(); ++i) {
      flats.push_back(at::empty({world_.buckets[i].numel()}));
      float* values = flats[i].data_ptr<float>();
      for (int64_t j = 0; j < flats[i].numel(); ++j) values[j] = value_of(rank_, round, i, j);
      world_.point();
      futures.push_back(lane_->post({.plan = plans_[i], .flat = flats[i], .round = round}));
    }
    for (const auto& future : futures) future->waitAndThrow();
    return flats;
  }

 private:
  const World& world_;
  int rank_;
  std::vector<std::shared_ptr<const JobPlan>> plans_;
  std::unique_ptr<DynamicLane> lane_;
};

inline void jobs_of_dynamic_lanes_give_equal_bits(Random& random, const Delays& delays) {
  const World world(random, 1, kPatient, {}, delays);
  const int rounds = between(random, 1, 6);
  std::vector<std::vector<at::Tensor>> results(world.ranks);
  const auto endings = run_ranks(world, [&](int rank) {
    RankLane mine(world, rank);
    for (int round = 1; round <= rounds; ++round) {
      results[rank] = mine.run_round(round);
      expect(mine.lane().stats().rounds == round, "the statistics lost a round");
    }
  });
  for (const Ending& ending : endings) expect(ending.error.empty(), ending.error);
  for (size_t i = 0; i < world.buckets.size(); ++i) {
    if (world.ranks > 1) check_against_mean(world, i, rounds, results[0][i]);
    for (int rank = 1; rank < world.ranks; ++rank) {
      expect_same_bits(results[0][i], results[rank][i], i);
    }
  }
}

// The culprit's op throws, or it aborts or stops its lane from another thread.
inline void a_dynamic_lane_that_ends_is_told_to_every_rank(Random& random, const Delays& delays) {
  const World world(random, 2, kPatient, {}, delays);
  const int culprit = between(random, 0, world.ranks - 1);
  const int fate = between(random, 0, 2);
  const int64_t round = between(random, 1, 4);
  const auto endings = run_ranks(world, [&](int rank) {
    RankLane mine(world, rank, [&](int where, const Round& now) {
      if (fate == 0 && where == culprit && now.number == round) throw Error("no memory");
    });
    std::thread other;
    for (int64_t now = 1; now < 1000; ++now) {
      if (rank == culprit && now == round && fate > 0) {
        other =
            std::thread([&] { fate == 1 ? mine.lane().abort("no memory") : mine.lane().stop(); });
      }
      try {
        mine.run_round(now);
      } catch (...) {
        if (other.joinable()) other.join();
        throw;
      }
    }
  });
  // A lane that stops between two jobs of a round does not know that the round was not over.
  expect_everywhere(endings, fate == 2 ? "rank " : "no memory");
}

}  // namespace bagua::stress
