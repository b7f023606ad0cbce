// What ranks tell each other about where they are, and what follows from looking at it twice.
#pragma once

#include <cstdint>
#include <optional>
#include <set>
#include <string>
#include <vector>

namespace bagua {

// What a rank is doing, for the others' messages.
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

// What one look at the store showed.
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

// "rank 1 is silent (...), last heard of in round 5: ...; rank 2 is 1 round behind, ...". The looks
// are more than a heartbeat apart. If nobody is silent, behind or ahead: who is in the same round
// and does not wait, and so is waited for. Last, who has failed too. Empty if there is nobody to
// speak of.
std::string where_others_are(const Snapshot& before, const Snapshot& after,
                             const Observer& onlooker);

}  // namespace bagua
