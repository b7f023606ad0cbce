// Positions that ranks tell each other, and conclusions from two looks at them.
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
  bool waits;        // for others: it has nothing left to do in that round itself
  std::string text;  // "computing, 3 of 8 tensors are ready"
};

struct Heartbeat {
  int64_t number = 0;  // of the heartbeat: a rank that is there counts on
  Whereabouts where{};
};

// As it stands in the store; parse_heartbeat returns nothing for what is not of that form.
std::string heartbeat_text(const Heartbeat& beat);
std::optional<Heartbeat> parse_heartbeat(const std::string& written);

// Result of one look at the store.
struct Snapshot {
  std::vector<std::optional<Heartbeat>> beats;  // by rank
  std::set<int> failed;                         // ranks that have said so
};

// From whose point of view two looks are compared.
struct Observer {
  int rank;
  int64_t round;
  std::string unit = "round";  // what is counted
  bool everyone = false;       // say also where those are that are where they should be
};

// One sentence per rank, without a full stop.
struct OtherRanks {
  // Ranks that are silent, behind or ahead; if there are none, ranks in the same round that are
  // still computing, and so are waited for.
  std::vector<std::string> causes;
  std::vector<std::string> failed;  // ranks that failed too
  std::string nobody;               // a sentence that says that there are none, or why
};

// Compares two snapshots that are more than a heartbeat apart.
OtherRanks where_others_are(const Snapshot& before, const Snapshot& after,
                            const Observer& observer);

}  // namespace bagua
