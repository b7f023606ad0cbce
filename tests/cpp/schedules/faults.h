// Schedules with one fault: every rank's wait ends, and tells what happened.
#pragma once

#include <atomic>
#include <functional>
#include <memory>
#include <stdexcept>
#include <string>
#include <thread>
#include <utility>

#include "schedules/rounds.h"

namespace bagua::stress {

// Does something in a thread of its own once so many points have been passed, unless it is
// destroyed before.
class AtPoint {
 public:
  AtPoint(Delays delays, int64_t point, std::function<void()> what)
      : thread_([this, delays = std::move(delays), point, what = std::move(what)] {
          while (delays->passed() < point) {
            if (over_) return;
            std::this_thread::sleep_for(std::chrono::microseconds(50));
          }
          what();
        }) {}
  ~AtPoint() {
    over_ = true;
    thread_.join();
  }

 private:
  std::atomic<bool> over_{false};
  std::thread thread_;
};

inline void an_abort_at_any_moment_ends_all_waits(Random& random, const Delays& delays) {
  const World world(random, 2, kPatient, kSmall, delays);
  const int culprit = between(random, 0, world.ranks - 1), threads = between(random, 1, 2);
  const int64_t point = between(random, 0, 120);
  const uint64_t seed = random();
  const auto endings = run_ranks(world, [&](int rank) {
    Random own(seed + rank);
    RankEngine mine(world, rank);
    const auto abort = [&] { mine.engine().abort("the reason"); };
    std::vector<std::unique_ptr<AtPoint>> aborters;
    for (int i = 0; rank == culprit && i < threads; ++i) {
      aborters.push_back(std::make_unique<AtPoint>(delays, point, abort));
    }
    while (true) {
      run_turbulent_round(world, mine, rank, own, seed);
      world.point();
      if (rank == culprit && delays->passed() > 2 * point) abort();
    }
  });
  expect_everywhere(endings, "the reason");
}

inline void an_op_that_throws_is_told_everywhere(Random& random, const Delays& delays) {
  const World world(random, 1, kPatient, kSmall, delays);
  const int culprit = between(random, 0, world.ranks - 1), round = between(random, 1, 3);
  const size_t buckets = world.buckets.size();
  const std::string bucket = std::to_string(between(random, 0, static_cast<int>(buckets) - 1));
  const bool is_exception = between(random, 0, 3) > 0;
  const uint64_t seed = random();
  const auto endings = run_ranks(world, [&](int rank) {
    Random own(seed + rank);
    RankEngine mine(world, rank, [&](int at, const Round& now) {
      world.point();
      if (at != culprit || now.number != round || now.bucket != bucket) return;
      if (is_exception) throw std::runtime_error("no memory");
      throw 42;
    });
    while (true) run_turbulent_round(world, mine, rank, own, seed);
  });
  expect_everywhere(endings, is_exception ? "no memory" : "unknown error");
  expect_everywhere(endings, concat("rank ", culprit, " of ", world.ranks, ", round ", round,
                                    ", bucket '", bucket, "'"));
  expect_everywhere(endings, "DisturbingOp");
}

inline void a_rank_that_exits_is_named(Random& random, const Delays& delays) {
  const World world(random, 2, kPatient, kSmall, delays);
  const int early = between(random, 0, world.ranks - 1), rounds = between(random, 0, 3);
  const bool begins_another = between(random, 0, 1);
  const uint64_t seed = random();
  const auto endings = run_ranks(world, [&](int rank) {
    Random own(seed + rank);
    RankEngine mine(world, rank);
    for (int i = 0; rank != early || i < rounds; ++i) {
      run_turbulent_round(world, mine, rank, own, seed);
    }
    if (begins_another) mine.begin();
  });
  expect_everywhere(endings, concat("rank ", early, " exited after ", rounds, " rounds"), early);
}

inline void engines_are_destroyed_at_any_moment(Random& random, const Delays& delays) {
  const World world(random, 2, kPatient, kSmall, delays);
  const uint64_t seed = random();
  const auto endings = run_ranks(world, [&](int rank) {
    Random own(seed + rank);
    RankEngine mine(world, rank);
    const StatsReader reader(mine.engine());
    for (int i = between(own, 0, 2); i > 0; --i) {
      run_turbulent_round(world, mine, rank, own, seed);
    }
    mine.begin();
    mine.mark(own, between(own, 0, static_cast<int>(mine.engine().slots())));
    world.point();
  });
  for (const Ending& ending : endings) {
    const bool told = ending.error.find("was stopped") != std::string::npos ||
                      ending.error.find(" exited after ") != std::string::npos;
    expect(ending.error.empty() || told, "a rank was told: ", ending.error);
  }
}

inline void a_wait_ends_at_the_deadline(Random& random, const Delays& delays) {
  const milliseconds timeout(between(random, 100, 300));
  const World world(random, 2, timeout, kSmall, delays);
  const int silent = between(random, 0, world.ranks - 1);
  const bool marks = between(random, 0, 1);
  const uint64_t seed = random();
  std::atomic<int> ended{0};
  const auto endings = run_ranks(world, [&](int rank) {
    Random own(seed + rank);
    RankEngine mine(world, rank);
    mine.begin();
    if (rank == silent) {
      if (marks) mine.mark(own, 1);
      while (ended < world.ranks - 1) std::this_thread::sleep_for(milliseconds(2));
      return;
    }
    try {
      mine.mark(own);
      mine.engine().wait();
    } catch (...) {
      ++ended;
      throw;
    }
  });
  expect_deadline(endings, concat("no result within ", timeout.count(), " ms"), silent);
}

inline void a_round_left_unfinished_is_told_everywhere(Random& random, const Delays& delays) {
  World world(random, 2, kPatient, kSmall, delays);
  world.buckets[0].slots.push_back(5);  // at least two slots, or none marked is no round at all
  const int culprit = between(random, 0, world.ranks - 1), rounds = between(random, 0, 2);
  const uint64_t seed = random();
  const auto endings = run_ranks(world, [&](int rank) {
    Random own(seed + rank);
    RankEngine mine(world, rank);
    for (int i = 0; i < rounds; ++i) run_turbulent_round(world, mine, rank, own, seed);
    mine.begin();
    mine.mark(own, rank == culprit ? 1 : 0);
    if (rank != culprit) mine.engine().wait();
    mine.begin();
  });
  expect_everywhere(endings, "left unfinished");
}

inline void another_plan_is_found_before_bytes_are_mixed(Random& random, const Delays& delays) {
  const World world(random, 2, kPatient, kSmall, delays);
  const int other = between(random, 0, world.ranks - 1);
  const uint64_t seed = random();
  std::atomic<int> ops{0};
  const auto endings = run_ranks(world, [&](int rank) {
    Random own(seed + rank);
    RankEngine mine(world, rank, [&](int, const Round&) { ++ops; }, rank == other ? 2 : 1);
    while (true) run_turbulent_round(world, mine, rank, own, seed);
  });
  expect_everywhere(endings, "ranks differ in the bucket plan");
  expect(ops == 0, ops.load(), " ops ran before the ranks agreed");
}

}  // namespace bagua::stress
