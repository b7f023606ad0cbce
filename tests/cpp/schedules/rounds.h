// Schedules without a fault: whatever the order of threads, rounds end with the right bits.
#pragma once

#include <memory>
#include <vector>

#include "stress/checks.h"

namespace bagua::stress {

constexpr PlanLimits kSmall{
    .ranks = 3, .lanes = 3, .buckets = 4, .slots = 3, .numel = 8, .numel_of_few = 300};

// What all ranks do in their rounds must be drawn from equal numbers.
inline Random common_draws(uint64_t seed, int64_t round) { return Random(seed + 1000003 * round); }

// One round with all that a caller may do in it.
inline void run_turbulent_round(const World& world, RankEngine& mine, int rank, Random& own,
                                uint64_t seed) {
  Engine& engine = mine.engine();
  mine.begin();
  world.point();
  if (between(own, 0, 7) == 0) mine.begin();  // a forward without backward
  Random common = common_draws(seed, engine.round());
  if (between(own, 0, 3) == 0) engine.await_agreement();
  mine.mark(own);
  world.point();
  const bool exchanges_used = between(common, 0, 3) == 0;
  if (exchanges_used) {
    std::vector<uint8_t> used(engine.slots());
    for (size_t i = 0; i < used.size(); ++i) used[i] = (i + rank + engine.round()) % 5 == 0;
    engine.exchange_used(used);
  }
  world.point();
  engine.wait();
  for (size_t i = 0; exchanges_used && i < engine.slots(); ++i) {
    bool any = false;
    for (int other = 0; other < world.ranks; ++other) any |= (i + other + engine.round()) % 5 == 0;
    expect(engine.used()[i] == any, "slot ", i, " is used: ", any, ", ranks were told otherwise");
  }
}

// By rank: the buckets' memory after each round that the rank has completed.
using Results = std::vector<std::vector<std::vector<at::Tensor>>>;

inline void keep(const RankEngine& mine, std::vector<std::vector<at::Tensor>>& results) {
  results.emplace_back();
  for (const at::Tensor& flat : mine.flats()) results.back().push_back(flat.clone());
}

// A round that any rank has completed gave the right numbers, and on all others the same bits.
inline void check_results(const World& world, const Results& results) {
  for (size_t round = 0;; ++round) {
    const std::vector<at::Tensor>* first = nullptr;
    for (const auto& own : results) {
      if (own.size() <= round) continue;
      for (size_t i = 0; i < world.buckets.size(); ++i) {
        if (first) {
          expect_same_bits((*first)[i], own[round][i], i);
        } else {
          check_against_mean(world, i, static_cast<int64_t>(round + 1), own[round][i]);
        }
      }
      first = &own[round];
    }
    if (!first) return;
  }
}

inline void rounds_end_with_the_right_bits(Random& random, const Delays& delays) {
  const PlanLimits limits = between(random, 0, 3) == 0 ? PlanLimits{} : kSmall;
  const World world(random, 1, kPatient, limits, delays);
  const int rounds = between(random, 1, 4);
  const uint64_t seed = random();
  Results results(world.ranks);
  const auto endings = run_ranks(world, [&](int rank) {
    Random own(seed + rank);
    RankEngine mine(world, rank);
    const StatsReader reader(mine.engine());
    for (int i = 0; i < rounds; ++i) {
      run_turbulent_round(world, mine, rank, own, seed);
      keep(mine, results[rank]);
    }
    for (const BucketStats& bucket : mine.engine().stats().buckets) {
      expect(bucket.rounds == rounds, "bucket ", bucket.name, " counted ", bucket.rounds);
    }
  });
  for (const Ending& ending : endings) expect(ending.error.empty(), ending.error);
  check_results(world, results);
}

}  // namespace bagua::stress
