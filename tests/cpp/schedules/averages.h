// Schedules of lanes that average weights beside training: pauses, and ends of every kind.
#pragma once

#include <memory>
#include <optional>
#include <vector>

#include "engine/periodic.h"
#include "op/async_average.h"
#include "schedules/faults.h"

namespace bagua::stress {

inline std::unique_ptr<PeriodicLane> make_lane(const World& world, int rank,
                                               const at::Tensor& weights) {
  auto communicator = world.connect(world.places[0], rank);
  auto gate = std::make_shared<WeightGate>();
  auto op = std::make_shared<AsyncAverage>(communicator, std::vector<at::Tensor>{weights}, gate);
  return std::make_unique<PeriodicLane>(
      std::move(op), std::move(gate),
      LaneOptions{.name = "stress",
                  .control = nullptr,
                  .ops = {std::move(communicator)},
                  .board = std::make_shared<FailureBoard>(world.store, rank, world.ranks)},
      PeriodicLaneOptions{.interval = milliseconds(rank % 2), .timeout = kPatient});
}

// One step of training inside the gate, which adds `amount` to all weights.
inline void train(const World& world, PeriodicLane& lane, const at::Tensor& weights,
                  double amount) {
  lane.enter();
  world.point();
  expect(lane.inside(), "training is not inside the gate that it entered");
  double* values = weights.data_ptr<double>();
  for (int64_t i = 0; i < weights.numel(); ++i) values[i] += amount;
  world.point();
  lane.leave();
}

// Ends a phase in one of the ways that training has.
inline void pause_somehow(const World& world, PeriodicLane& lane, Random& own) {
  if (between(own, 0, 3) == 0) lane.enter();  // pausing leaves the gate
  if (between(own, 0, 1)) lane.ask_to_pause();
  world.point();
  if (between(own, 0, 1)) {
    while (!lane.pause(milliseconds(between(own, 0, 3)))) world.point();
  } else {
    lane.pause();
  }
  expect(!lane.running(), "a paused lane is running");
}

// Averaging keeps the sum over ranks: a lost update, or one counted twice, would change it.
inline void averages_keep_the_sum_in_any_order(Random& random, const Delays& delays) {
  const World world(random, 1, kPatient, kSmall, delays);
  const int phases = between(random, 1, 3), numel = between(random, 1, 20);
  const int most_steps = between(random, 0, 3) == 0 ? 200 : 8;
  const uint64_t seed = random();
  std::vector<at::Tensor> weights;
  for (int rank = 0; rank < world.ranks; ++rank) {
    weights.push_back(at::empty({numel}, at::kDouble).zero_());
  }
  std::vector<double> added(world.ranks);
  const auto endings = run_ranks(world, [&](int rank) {
    Random own(seed + rank);
    const auto lane = make_lane(world, rank, weights[rank]);
    std::optional<AtPoint> reader;
    reader.emplace(delays, between(own, 0, 50),
                   [&lane] { expect(lane->stats().rounds >= 0, "averages cannot be negative"); });
    for (int phase = 0; phase < phases; ++phase) {
      lane->resume();
      for (int step = between(own, 0, most_steps); step > 0; --step) {
        train(world, *lane, weights[rank], rank + 1);
        added[rank] += rank + 1;
        if (between(own, 0, 3) == 0) lane->check();
      }
      pause_somehow(world, *lane, own);
    }
    reader.reset();
  });
  double expected = 0;
  for (int rank = 0; rank < world.ranks; ++rank) {
    expect(endings[rank].error.empty(), "rank ", rank, ": ", endings[rank].error);
    expected += added[rank];
  }
  for (int64_t i = 0; i < numel; ++i) {
    double sum = 0;
    for (const at::Tensor& tensor : weights) sum += tensor.data_ptr<double>()[i];
    expect(std::abs(sum - expected) <= 1e-9 * expected, "element ", i, ": the sum is ", sum,
           ", training made it ", expected);
  }
}

inline void a_lane_ends_at_any_moment(Random& random, const Delays& delays) {
  const World world(random, 2, kPatient, kSmall, delays);
  const int early = between(random, 0, world.ranks - 1);
  const bool inside = between(random, 0, 1), is_destroyed = between(random, 0, 1);
  const int64_t point = between(random, 0, 60);
  const uint64_t seed = random();
  const auto endings = run_ranks(world, [&](int rank) {
    Random own(seed + rank);
    const at::Tensor weights = at::empty({5}, at::kDouble).zero_();
    auto lane = make_lane(world, rank, weights);
    lane->resume();
    if (rank != early) {
      while (true) {
        lane->check();
        train(world, *lane, weights, 1);
        std::this_thread::sleep_for(std::chrono::microseconds(200));
      }
    }
    // Another thread stops the lane while this one trains, or this one does.
    std::optional<AtPoint> stopper;
    if (!is_destroyed) stopper.emplace(delays, point, [&lane] { lane->stop(); });
    while (delays->passed() < point) train(world, *lane, weights, 1);
    if (inside) lane->enter();
    stopper.reset();
    lane.reset();
  });
  expect_everywhere(endings, concat("rank ", early, " exited after"), early);
}

}  // namespace bagua::stress
