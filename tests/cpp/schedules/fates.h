// Schedules in which one rank goes wrong, or several at once, each in its own way.
#pragma once

#include <limits>
#include <optional>
#include <stdexcept>
#include <string>
#include <vector>

#include "schedules/faults.h"

namespace bagua::stress {

constexpr int kEndless = std::numeric_limits<int>::max();  // rounds

// What becomes of one rank.
struct Fate {
  enum Kind { kNone, kAborts, kOpThrows, kExits, kIsDestroyed, kLeavesARoundUnfinished };
  Kind kind = kNone;
  int round = 0;      // in which it happens; kExits: after which
  int64_t point = 0;  // kAborts: when
  size_t bucket = 0;  // kOpThrows: whose
  bool is_exception = true;

  // Whether the rank never takes part in a round after its own, so that no other can either.
  bool ends_rounds_before(int rounds) const {
    if (kind == kOpThrows || kind == kIsDestroyed || kind == kExits) return round < rounds;
    return kind == kLeavesARoundUnfinished || (kind == kAborts && rounds == kEndless);
  }

  std::vector<std::string> words(int rank) const {
    const std::string exited = concat("rank ", rank, " exited after");
    switch (kind) {
      case kNone:
        return {};
      case kAborts:
        return {concat("the reason of ", rank)};
      case kOpThrows:
        return {is_exception ? concat("no memory on ", rank) : "unknown error"};
      case kExits:
        return {exited};
      case kIsDestroyed:
        return {exited, "was stopped"};
      case kLeavesARoundUnfinished:
        return {"left unfinished"};
    }
    return {};
  }
};

inline Fate draw_fate(Random& random, const World& world, Fate::Kind least, int last_round) {
  const auto kind = static_cast<Fate::Kind>(between(random, least, Fate::kLeavesARoundUnfinished));
  return {
      .kind = kind,
      .round = between(random, kind == Fate::kExits ? 0 : 1, last_round),
      .point = between(random, 0, 150),
      .bucket = static_cast<size_t>(between(random, 0, static_cast<int>(world.buckets.size()) - 1)),
      .is_exception = between(random, 0, 3) > 0};
}

// The rounds of one rank, until its fate.
inline void live(const World& world, RankEngine& mine, int rank, const Fate& fate, int rounds,
                 Random& own, uint64_t seed, std::vector<std::vector<at::Tensor>>& results) {
  for (int round = 1; round <= rounds; ++round) {
    if (fate.kind == Fate::kExits && round > fate.round) return;
    if (fate.kind == Fate::kIsDestroyed && round == fate.round) {
      mine.begin();
      return mine.mark(own, between(own, 0, 4));
    }
    if (fate.kind == Fate::kLeavesARoundUnfinished && round == fate.round) {
      mine.begin();
      mine.mark(own, 1);
      mine.begin();
      throw Broken("a round was left unfinished, and the next one began");
    }
    run_turbulent_round(world, mine, rank, own, seed);
    keep(mine, results);
  }
}

inline void expect_told(const World& world, const std::vector<Fate>& fates,
                        const std::vector<Ending>& endings, int rounds) {
  bool ends_early = false;
  std::vector<std::string> words;
  for (int rank = 0; rank < world.ranks; ++rank) {
    ends_early |= fates[rank].ends_rounds_before(rounds);
    for (const std::string& text : fates[rank].words(rank)) words.push_back(text);
  }
  for (int rank = 0; rank < world.ranks; ++rank) {
    const std::string& error = endings[rank].error;
    const bool stays = fates[rank].kind == Fate::kNone || fates[rank].kind == Fate::kAborts;
    expect(!(stays && ends_early && error.empty()), "rank ", rank, " was told nothing");
    if (error.empty()) continue;
    const bool explained = std::any_of(words.begin(), words.end(), [&](const std::string& text) {
      return error.find(text) != std::string::npos;
    });
    expect(explained && !endings[rank].timed_out, "rank ", rank, " was told: ", error);
  }
}

// Of the only rank that went wrong all others are told exactly what.
inline void expect_details(const World& world, const Fate& fate, int culprit,
                           const std::vector<Ending>& endings) {
  if (fate.kind == Fate::kExits) {
    expect_everywhere(endings, concat("rank ", culprit, " exited after ", fate.round, " rounds"),
                      culprit);
  }
  if (fate.kind == Fate::kOpThrows) {
    expect_everywhere(endings, concat("rank ", culprit, " of ", world.ranks, ", round ", fate.round,
                                      ", bucket '", fate.bucket, "'"));
    expect_everywhere(endings, "DisturbingOp");
  }
}

// What comes after a failure: the module is wrapped again, beside lanes that may still be ending.
inline void wrap_again(const World& before, Random& random) {
  World world = before;
  world.meet_anew();
  const uint64_t seed = random();
  Results results(world.ranks);
  const auto endings = run_ranks(world, [&](int rank) {
    Random own(seed + rank);
    RankEngine mine(world, rank);
    run_turbulent_round(world, mine, rank, own, seed);
    keep(mine, results[rank]);
  });
  for (const Ending& ending : endings) expect(ending.error.empty(), "once more: ", ending.error);
  check_results(world, results);
}

inline void ranks_meet_their_fates(Random& random, const Delays& delays) {
  World world(random, 2, kPatient, kSmall, delays);
  world.buckets[0].slots.push_back(3);  // so that a round can be left unfinished
  const int culprit = between(random, -1, world.ranks - 1);  // -1: all may go wrong
  const int last_round = between(random, 1, 3);
  const int rounds = culprit < 0 ? last_round : kEndless;
  std::vector<Fate> fates(world.ranks);
  for (int rank = 0; rank < world.ranks; ++rank) {
    if (culprit >= 0 && rank != culprit) continue;
    fates[rank] = draw_fate(random, world, culprit < 0 ? Fate::kNone : Fate::kAborts, last_round);
  }
  const uint64_t seed = random();
  Results results(world.ranks);
  const auto endings = run_ranks(world, [&](int rank) {
    Random own(seed + rank);
    const Fate& fate = fates[rank];
    RankEngine mine(world, rank, [&](int at, const Round& now) {
      world.point();
      const Fate& own_fate = fates[at];
      if (own_fate.kind == Fate::kOpThrows && now.number == own_fate.round &&
          now.bucket == std::to_string(own_fate.bucket)) {
        if (!own_fate.is_exception) throw 42;
        throw std::runtime_error(concat("no memory on ", at));
      }
    });
    std::optional<AtPoint> aborter;
    if (fate.kind == Fate::kAborts) {
      const std::string reason = concat("the reason of ", rank);
      aborter.emplace(delays, fate.point, [&mine, reason] { mine.engine().abort(reason); });
    }
    live(world, mine, rank, fate, rounds, own, seed, results[rank]);
  });
  check_results(world, results);
  expect_told(world, fates, endings, rounds);
  if (culprit >= 0) expect_details(world, fates[culprit], culprit, endings);
  if (between(random, 0, 3) == 0) wrap_again(world, random);
}

}  // namespace bagua::stress
