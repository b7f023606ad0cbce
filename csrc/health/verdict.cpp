#include "health/verdict.h"

#include <algorithm>
#include <chrono>
#include <optional>
#include <sstream>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include <torch/csrc/distributed/c10d/Store.hpp>

#include "base/check.h"
#include "health/board.h"

namespace bagua {
namespace {

constexpr char kLooking = '?', kFound = '=';
constexpr size_t kMostSilent = 64;  // in a verdict
// Time for a verdict, also if the store is late, and between two questions for it.
constexpr std::chrono::milliseconds kUntilVerdict(4000), kBetweenVerdicts(300);

// The verdict, which is `text` from now on if it was `expected`. Nothing: no answer.
std::optional<std::string> swap_verdict(Board& board, const std::string& expected,
                                        const std::string& text) {
  const auto now = std::make_shared<std::string>();
  const bool answered = board.ask([now, expected, text](c10d::Store& store) {
    *now = store.compareSet(kVerdictKey, expected, text);
  });
  return answered ? std::optional(*now) : std::nullopt;
}

// Ranks and the numbers of their heartbeats. Any text is accepted.
std::vector<std::pair<int, int64_t>> named_in(const std::string& verdict, const Board& board) {
  std::vector<std::pair<int, int64_t>> named;
  if (!verdict.starts_with(kFound)) return named;
  std::istringstream words(verdict.substr(1));
  std::pair<int, int64_t> one;
  while (named.size() < kMostSilent && words >> one.first >> one.second) {
    if (one.first >= 0 && one.first < board.size() && one.first != board.rank()) {
      named.push_back(one);
    }
  }
  return named;
}

// The heartbeats of those that are named and have not beaten since; null: none.
std::shared_ptr<const Snapshot> still_silent(Board& board, const std::string& verdict) {
  const auto named = named_in(verdict, board);
  if (named.empty()) return nullptr;
  const auto found = std::make_shared<Snapshot>();
  found->beats.resize(board.size());
  const bool answered = board.ask([found, named](c10d::Store& store) {
    std::vector<std::string> keys;
    for (const auto& [other, number] : named) keys.push_back(beat_key(other));
    if (!store.check(keys)) return;
    const auto texts = store.multiGet(keys);
    for (size_t i = 0; i < std::min(named.size(), texts.size()); ++i) {
      auto beat =
          parse_heartbeat({reinterpret_cast<const char*>(texts[i].data()), texts[i].size()});
      const auto& [other, number] = named[i];
      if (beat && beat->number == number && !beat->exited) found->beats[other] = std::move(beat);
    }
  });
  const bool any = answered && std::any_of(found->beats.begin(), found->beats.end(),
                                           [](const auto& beat) { return beat.has_value(); });
  return any ? found : nullptr;
}

}  // namespace

Verdict await_verdict(Board& board) noexcept {
  const std::string mine = concat(kLooking, board.rank());
  const auto deadline = std::chrono::steady_clock::now() + kUntilVerdict;
  std::string expected;  // a verdict that this rank may replace
  bool waited = false;
  while (true) {
    const auto known = swap_verdict(board, expected, mine);
    if (known == mine) return {.for_all = true};
    const bool early = std::chrono::steady_clock::now() < deadline;
    if (!known && !early) return {};
    if (early && (!known || known->starts_with(kLooking))) {
      if (known) {
        waited = true;
        expected.clear();
      }
      std::this_thread::sleep_for(kBetweenVerdicts);
      continue;
    }
    if (auto silent = still_silent(board, *known)) return {.silent = std::move(silent)};
    // Nobody is silent, or two ranks were lost as they looked.
    if (!expected.empty() || (waited && known->starts_with(kFound))) return {};
    expected = *known;  // an old one, or of a rank that was lost as it looked
  }
}

void write_verdict(Board& board, const std::shared_ptr<const Snapshot>& before,
                   const std::shared_ptr<const Snapshot>& after) noexcept {
  std::string text(1, kFound);
  size_t named = 0;
  for (int other = 0; before && after && other < board.size() && named < kMostSilent; ++other) {
    const auto &then = before->beats[other], &now = after->beats[other];
    if (!then || !now || then->number != now->number || now->exited || other == board.rank()) {
      continue;
    }
    text += concat(" ", other, " ", now->number);
    ++named;
  }
  swap_verdict(board, concat(kLooking, board.rank()), text);
}

}  // namespace bagua
