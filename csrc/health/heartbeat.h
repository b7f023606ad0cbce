// Positions that ranks publish, and conclusions from two snapshots of them.
#pragma once

#include <cstdint>
#include <optional>
#include <set>
#include <string>
#include <vector>

namespace bagua {

// Position of a rank, for the others' messages.
struct Whereabouts {
  int64_t round;     // in which it is, or was last
  bool waits;        // for other ranks: its own part of that round is done
  std::string text;  // "computing, 3 of 8 tensors are ready"
};

struct Heartbeat {
  int64_t number = 0;  // of the heartbeat: a live rank increments it
  Whereabouts where{};
};

// Text in the store; parse_heartbeat returns nothing for text of another form.
std::string heartbeat_text(const Heartbeat& beat);
std::optional<Heartbeat> parse_heartbeat(const std::string& written);

// All heartbeats at one moment.
struct Snapshot {
  std::vector<std::optional<Heartbeat>> beats;  // by rank
  std::set<int> failed;                         // ranks that published a failure
};

// Where a rank is that looks for the others, or that has failed.
struct Position {
  int64_t number;              // of the round or call
  std::string unit = "round";  // what is counted
  bool everyone = false;       // also describe ranks in the same round
  int64_t needed = number;     // a rank that exited after fewer rounds is a cause
  int peer = -1;               // the rank that was waited for, which comes first; -1: all
};

// One sentence per rank, without a full stop.
struct OtherRanks {
  // Ranks that are silent, behind or ahead; if there are none, ranks in the same round that are
  // still computing, and so are waited for.
  std::vector<std::string> causes;
  std::vector<std::string> failed;  // ranks that failed too
  std::string nobody;               // a sentence for the case that there are none
  bool store_is_silent = false;     // then `nobody` says so
};

// Compares two snapshots that are more than a heartbeat apart, for `rank`, which is at `here`.
OtherRanks where_others_are(const Snapshot& before, const Snapshot& after, int rank,
                            const Position& here);

// All of it in one sentence, for a rank that has not failed.
std::string in_words(const OtherRanks& others);

}  // namespace bagua
