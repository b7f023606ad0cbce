// Low-rank means in several lanes at a time, whose memories change together or not at all.
#pragma once

#include <algorithm>
#include <cmath>
#include <limits>
#include <thread>

#include "op/low_rank.h"
#include "stress/checks.h"

namespace bagua::stress {

// One lane of one rank: an op, its memory and its bucket.
struct LowRankLane {
  std::shared_ptr<RoundMemory> memory;
  std::unique_ptr<LowRank> op;
  at::Tensor flat;
};

inline LowRankLane make_low_rank_lane(const World& world, int rank, int lane, Random random,
                                      const std::shared_ptr<RoundOutcome>& outcome) {
  std::vector<LowRankMatrix> matrices;
  int64_t numel = between(random, 0, 20), queries = 0;
  for (int i = between(random, 0, 5); i > 0; --i) {
    const int64_t rows = between(random, 1, 90), columns = between(random, 1, 90);
    const int64_t factors = between(random, 1, static_cast<int>(std::min(rows, columns)));
    matrices.push_back({numel, rows, columns, std::min<int64_t>(factors, 5)});
    queries += columns * matrices.back().rank;
    numel += rows * columns + between(random, 0, 9);
  }
  const bool error_feedback = between(random, 0, 3) > 0;
  const auto zeros = [](int64_t n) { return at::empty({n}).zero_(); };
  LowRankLane made;
  made.memory = std::make_shared<RoundMemory>(
      std::vector<at::Tensor>{zeros(error_feedback ? numel : 0), zeros(queries),
                              at::empty({1}, at::kLong).zero_()},
      outcome);
  made.op = std::make_unique<LowRank>(
      world.connect(world.places[lane], rank), std::make_shared<Scratch>(), numel, matrices,
      LowRankOptions{
          .warm_start = between(random, 0, 1) == 1, .error_feedback = error_feedback, .seed = 7},
      made.memory);
  made.flat = zeros(numel);
  return made;
}

inline void low_rank_memories_change_together(Random& random, const Delays& delays) {
  const World world(random, 1, kPatient, {}, delays);
  const int rounds = between(random, 1, 5);
  const int bad_round = between(random, 0, rounds), bad_lane = between(random, 0, world.lanes - 1);
  const uint64_t shapes = random();
  std::vector<std::vector<LowRankLane>> all(world.ranks);
  const auto endings = run_ranks(world, [&](int rank) {
    auto outcome = std::make_shared<RoundOutcome>();
    std::vector<LowRankLane>& lanes = all[rank];
    for (int i = 0; i < world.lanes; ++i) {
      lanes.push_back(make_low_rank_lane(world, rank, i, Random(shapes + i), outcome));
    }
    const std::string bucket = "stress";
    for (int round = 1; round <= rounds; ++round) {
      std::vector<int64_t> before;
      for (const LowRankLane& lane : lanes) {
        before.push_back(*lane.memory->value(2).data_ptr<int64_t>());
      }
      std::vector<std::thread> threads;
      for (int i = 0; i < world.lanes; ++i) {
        threads.emplace_back([&, i] {
          LowRankLane& lane = lanes[i];
          float* values = lane.flat.data_ptr<float>();
          for (int64_t k = 0; k < lane.flat.numel(); ++k) values[k] = value_of(rank, round, i, k);
          const bool bad = round == bad_round && i == bad_lane && rank == world.ranks - 1;
          if (bad && lane.flat.numel() > 0) values[0] = std::numeric_limits<float>::quiet_NaN();
          lane.op->run(lane.flat, {.number = round, .grad_scale = 1.0f, .bucket = bucket});
        });
      }
      for (std::thread& thread : threads) thread.join();
      const bool kept = round == bad_round && lanes[bad_lane].flat.numel() > 0;
      for (int i = 0; i < world.lanes; ++i) {
        const int64_t done = *lanes[i].memory->value(2).data_ptr<int64_t>();
        const int64_t expected = before[i] + (kept || world.ranks == 1 ? 0 : 1);
        expect(done == expected, "lane ", i, " has committed ", done, " rounds, not ", expected);
      }
    }
  });
  for (const Ending& ending : endings) expect(ending.error.empty(), ending.error);
  for (int rank = 1; rank < world.ranks; ++rank) {
    for (int i = 0; i < world.lanes; ++i) {
      expect(same_bits(all[rank][i].flat, all[0][i].flat) &&
                 same_bits(all[rank][i].memory->value(1), all[0][i].memory->value(1)),
             "rank ", rank, " differs from rank 0 in lane ", i);
    }
  }
}

}  // namespace bagua::stress
