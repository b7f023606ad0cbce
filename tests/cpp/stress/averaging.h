// Weights that are averaged while every rank trains them.
#pragma once

#include "engine/periodic.h"
#include "op/async_average.h"
#include "stress/world.h"

namespace bagua::stress {

inline std::unique_ptr<PeriodicLane> make_lane(const World& world, int rank,
                                               const at::Tensor& weights) {
  auto communicator = world.connect(world.places[0], rank);
  auto gate = std::make_shared<WeightGate>();
  auto op = std::make_shared<AsyncAverage>(communicator, std::vector<at::Tensor>{weights}, gate);
  return std::make_unique<PeriodicLane>(
      std::move(op), std::move(gate),
      PeriodicLaneOptions{.name = "stress",
                          .interval = milliseconds(rank % 2),
                          .timeout = milliseconds(20000),
                          .communicator = std::move(communicator),
                          .board = std::make_shared<FailureBoard>(world.store, rank, world.ranks)});
}

// Averaging keeps the sum over ranks: a lost update, or one counted twice, would change it.
inline void averages_keep_the_sum(Random& random) {
  const World world(random, 2, milliseconds(20000));
  const int phases = between(random, 1, 3), steps = between(random, 10, 200);
  const int64_t numel = between(random, 1, 3000);
  std::vector<at::Tensor> weights;
  for (int rank = 0; rank < world.ranks; ++rank) {
    weights.push_back(at::empty({numel}, at::kDouble).zero_());
  }
  double expected = 0;
  const auto endings = run_ranks(world, [&](int rank) {
    const auto lane = make_lane(world, rank, weights[rank]);
    double* values = weights[rank].data_ptr<double>();
    for (int phase = 0; phase < phases; ++phase) {
      lane->resume();
      for (int step = 0; step < steps * (rank + 1); ++step) {
        lane->enter();
        for (int64_t i = 0; i < numel; ++i) values[i] += rank + 1;
        lane->leave();
        if (step % 16 == 0) expect(lane->stats().rounds >= 0, "averages cannot be negative");
      }
      lane->pause();
      expect(!lane->running(), "a paused lane is running");
    }
  });
  for (int rank = 0; rank < world.ranks; ++rank) {
    expect(endings[rank].error.empty(), "rank ", rank, ": ", endings[rank].error);
    expected += static_cast<double>(phases) * steps * (rank + 1) * (rank + 1);
  }
  for (int64_t i = 0; i < numel; ++i) {
    double sum = 0;
    for (const at::Tensor& tensor : weights) sum += tensor.data_ptr<double>()[i];
    expect(std::abs(sum - expected) < 1e-6 * expected, "element ", i, ": the sum is ", sum,
           ", training made it ", expected);
  }
}

inline void a_lane_stops_while_others_average(Random& random) {
  const World world(random, 2, milliseconds(20000));
  const int early = between(random, 0, world.ranks - 1);
  std::vector<at::Tensor> weights(world.ranks);
  const auto endings = run_ranks(world, [&](int rank) {
    weights[rank] = at::empty({100}).zero_();
    const auto lane = make_lane(world, rank, weights[rank]);
    lane->resume();
    if (rank == early) {
      while (lane->stats().rounds == 0) std::this_thread::yield();
      lane->stop();
      return;
    }
    lane->pause();
  });
  for (int rank = 0; rank < world.ranks; ++rank) {
    expect((rank == early) == endings[rank].error.empty(), "rank ", rank,
           " ended with: ", endings[rank].error);
  }
}

}  // namespace bagua::stress
