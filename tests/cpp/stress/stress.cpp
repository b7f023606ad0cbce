// Engines, lanes and thread ranks under a sanitizer: `make sanitize`.
//
// Usage: stress [seed [seconds]]. Runs every scenario with random plans until the time is over, at
// least once each. Prints the seed of each run; a failure or a hang is repeated by passing it.
#include <cstdio>
#include <cstdlib>

#include <unistd.h>

#include "stress/averaging.h"
#include "stress/checks.h"
#include "stress/dynamic.h"
#include "stress/gossip.h"
#include "stress/low_rank.h"
#include "stress/shared_memory.h"
#include "stress/sparse.h"
#include "stress/world.h"

namespace bagua::stress {
namespace {

constexpr milliseconds kPatient{20000};

void rounds_give_equal_bits(Random& random) {
  const World world(random, 1, kPatient);
  const int rounds = between(random, 2, 5);
  const uint64_t seed = random();
  std::vector<std::vector<at::Tensor>> results(world.ranks);
  const auto endings = run_ranks(world, [&](int rank) {
    Random own(seed + rank);
    RankEngine mine(world, rank);
    const StatsReader reader(mine.engine());
    for (int i = 0; i < rounds; ++i) {
      mine.run_round(own);
      for (const at::Tensor& flat : mine.flats()) results[rank].push_back(flat.clone());
    }
    for (const BucketStats& bucket : mine.engine().stats().buckets) {
      expect(bucket.rounds == rounds, "bucket ", bucket.name, " counted ", bucket.rounds);
    }
  });
  for (const Ending& ending : endings) expect(ending.error.empty(), ending.error);
  for (size_t i = 0; i < results[0].size(); ++i) {
    const at::Tensor& first = results[0][i];
    const size_t bucket = i % world.buckets.size();
    check_against_mean(world, bucket, static_cast<int64_t>(i / world.buckets.size() + 1), first);
    for (const auto& other : results) expect_same_bits(first, other[i], bucket);
  }
}

void an_abort_reaches_every_rank(Random& random) {
  const World world(random, 2, kPatient);
  const int culprit = between(random, 0, world.ranks - 1);
  const milliseconds delay{between(random, 0, 20)};
  const uint64_t seed = random();
  const auto endings = run_ranks(world, [&](int rank) {
    Random own(seed + rank);
    RankEngine mine(world, rank);
    std::thread aborter([&] {
      std::this_thread::sleep_for(delay);
      if (rank == culprit) mine.engine().abort("the reason");
    });
    try {
      while (true) mine.run_round(own);
    } catch (...) {
      aborter.join();
      throw;
    }
  });
  expect_everywhere(endings, "the reason");
}

void an_op_that_throws_is_told_to_every_rank(Random& random) {
  const World world(random, 1, kPatient);
  const int culprit = between(random, 0, world.ranks - 1);
  const int round = between(random, 1, 3);
  const std::string bucket = std::to_string(between(random, 0, world.buckets.size() - 1));
  const uint64_t seed = random();
  const auto endings = run_ranks(world, [&](int rank) {
    Random own(seed + rank);
    RankEngine mine(world, rank, [&](int at, const Round& now) {
      if (at == culprit && now.number == round && now.bucket == bucket) {
        throw std::runtime_error("no memory");
      }
    });
    while (true) mine.run_round(own);
  });
  expect_everywhere(endings, "no memory");
  const std::string place =
      concat("rank ", culprit, " of ", world.ranks, ", round ", round, ", bucket '", bucket, "'");
  expect_everywhere(endings, place);
  expect_everywhere(endings, "DisturbingOp");
}

void a_rank_that_exits_early_is_named(Random& random) {
  const World world(random, 2, kPatient);
  const int early = between(random, 0, world.ranks - 1);
  const int rounds = between(random, 0, 3);
  const bool begins_another = between(random, 0, 1);
  const uint64_t seed = random();
  const auto endings = run_ranks(world, [&](int rank) {
    Random own(seed + rank);
    RankEngine mine(world, rank);
    for (int i = 0; rank != early || i < rounds; ++i) mine.run_round(own);
    if (begins_another) mine.begin();
  });
  expect_everywhere(endings, concat("rank ", early, " exited after ", rounds, " rounds"), early);
}

void an_engine_with_work_in_flight_is_destroyed_soon(Random& random) {
  std::weak_ptr<void> control;
  {
    const World world(random, 2, kPatient);
    control = world.control->held();
    const int silent = between(random, 0, world.ranks - 1);
    const uint64_t seed = random();
    std::atomic<int> here{0};
    run_ranks(world, [&](int rank) {
      Random own(seed + rank);
      auto mine = std::make_unique<RankEngine>(world, rank);
      if (rank != silent) {
        mine->begin();
        mine->mark(own);
      }
      for (++here; here < world.ranks;) std::this_thread::yield();
      const auto start = std::chrono::steady_clock::now();
      mine.reset();
      expect(std::chrono::steady_clock::now() - start < milliseconds(1000 + 1500 * world.lanes),
             "rank ", rank, " took too long to destroy its engine");
    });
  }
  // Lanes that had to be detached end as soon as their communicators were aborted, and free all.
  for (int i = 0; i < 500 && !control.expired(); ++i) {
    std::this_thread::sleep_for(milliseconds(10));
  }
  expect(control.expired(), "a detached lane still holds the communicators");
}

void a_wait_ends_at_its_deadline(Random& random) {
  const World world(random, 2, milliseconds(300));
  const int silent = between(random, 0, world.ranks - 1);
  const uint64_t seed = random();
  std::atomic<int> others_done{0};
  const auto endings = run_ranks(world, [&](int rank) {
    Random own(seed + rank);
    RankEngine mine(world, rank);
    mine.begin();
    if (rank == silent) {
      while (others_done < world.ranks - 1) std::this_thread::yield();
      return;
    }
    mine.mark(own);
    try {
      mine.engine().wait();
    } catch (...) {
      ++others_done;
      throw;
    }
  });
  expect_deadline(endings, "no result within 300 ms", silent);
  expect(std::any_of(endings.begin(), endings.end(), [](const Ending& e) { return e.timed_out; }),
         "no rank threw a TimeoutError");
}

void a_round_left_unfinished_is_an_error_everywhere(Random& random) {
  World world(random, 2, kPatient);
  world.buckets[0].slots.push_back(5);  // at least two slots, or none marked is no round at all
  const int culprit = between(random, 0, world.ranks - 1);
  const uint64_t seed = random();
  const auto endings = run_ranks(world, [&](int rank) {
    Random own(seed + rank);
    RankEngine mine(world, rank);
    mine.run_round(own);
    mine.begin();
    mine.mark(own, rank == culprit ? 1 : 0);
    if (rank != culprit) mine.engine().wait();
    mine.begin();
  });
  expect_everywhere(endings, "left unfinished");
}

struct Scenario {
  const char* name;
  void (*run)(Random&);
};

constexpr Scenario kScenarios[] = {
    {"rounds give equal bits", rounds_give_equal_bits},
    {"an abort reaches every rank", an_abort_reaches_every_rank},
    {"an op that throws is told to every rank", an_op_that_throws_is_told_to_every_rank},
    {"a rank that exits early is named", a_rank_that_exits_early_is_named},
    {"an engine with work in flight is destroyed soon",
     an_engine_with_work_in_flight_is_destroyed_soon},
    {"a wait ends at its deadline", a_wait_ends_at_its_deadline},
    {"a round left unfinished is an error everywhere",
     a_round_left_unfinished_is_an_error_everywhere},
    {"replicas are the neighbours' weights", replicas_are_the_neighbours_weights},
    {"low-rank memories change together", low_rank_memories_change_together},
    {"sparse memories change together", sparse_memories_change_together},
    {"jobs of dynamic lanes give equal bits", jobs_of_dynamic_lanes_give_equal_bits},
    {"a dynamic lane that ends is told to every rank",
     a_dynamic_lane_that_ends_is_told_to_every_rank},
    {"shared memory carries every call", shared_memory_carries_every_call},
    {"buckets are reduced in place", buckets_are_reduced_in_place},
    {"averages keep the sum", averages_keep_the_sum},
    {"a lane stops while others average", a_lane_stops_while_others_average},
};

int run_all(uint64_t seed, int seconds) {
  const auto end = std::chrono::steady_clock::now() + std::chrono::seconds(seconds);
  int runs = 0;
  for (; runs == 0 || std::chrono::steady_clock::now() < end; ++seed) {
    for (const Scenario& scenario : kScenarios) {
      std::printf("seed %llu: %s\n", static_cast<unsigned long long>(seed), scenario.name);
      std::fflush(stdout);
      Random random(seed);
      try {
        scenario.run(random);
      } catch (const std::exception& error) {
        std::printf("failed: %s\n", error.what());
        return 1;
      }
      ++runs;
    }
  }
  std::printf("%d runs passed\n", runs);
  return 0;
}

}  // namespace
}  // namespace bagua::stress

int main(int count, char** words) {
  const uint64_t seed = count > 1 ? std::strtoull(words[1], nullptr, 10) : std::random_device{}();
  const int seconds = count > 2 ? std::atoi(words[2]) : 15;
  alarm(seconds + 120);  // a hang ends the program; the last line says where
  return bagua::stress::run_all(seed, seconds);
}
