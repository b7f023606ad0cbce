// Positions that ranks publish, and conclusions from two snapshots of them.
#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

namespace bagua {

// Position of a rank at a seat, for the others' messages.
struct Whereabouts {
  int64_t round;     // in which it is, or was last
  bool waits;        // for other ranks: its own part of that round is done
  std::string text;  // "computing, 3 of 8 tensors are ready"
  // A thread that cannot go on meanwhile; 0: none is blocked. Others are told only whether.
  int64_t blocked = 0;
  int64_t driven_by = 0;  // the thread that begins rounds, if it is known; others are not told
};

// Note [Seats]
// Lanes, collective phases and communicators of eager calls each have a seat at the board of their
// group: a name, equal on all ranks, under which failures and exits are kept, and a position. One
// heartbeat of a rank has the positions of all of its seats, so that a rank that lives is never
// taken for a silent one, and that a wait at one seat can tell at which other one a rank is.
struct SeatPosition {
  std::string seat;  // without spaces; empty: the only one
  std::string head;  // "round 3 of module 'Net'"; empty where the text says all
  Whereabouts where;
  bool failed = false;
};

struct Heartbeat {
  int64_t number = 0;  // of the heartbeat: a live rank increments it
  std::vector<SeatPosition> positions{};
  bool more = false;    // there were more seats than there was place
  bool exited = false;  // the last heartbeat of a rank that has exited
  // Addresses from which no acknowledgement comes.
  std::string unreached{};

  const SeatPosition* at(const std::string& seat) const;
};

// Text in the store, at most kMostBeatBytes; parse_heartbeat returns nothing for text of another
// form.
inline constexpr size_t kMostBeatBytes = 2048;
std::string heartbeat_text(const Heartbeat& beat);
std::optional<Heartbeat> parse_heartbeat(std::string_view written);

// The key of a rank's heartbeat.
std::string beat_key(int rank);

// All heartbeats at one moment.
struct Snapshot {
  std::vector<std::optional<Heartbeat>> beats;  // by rank of the group
};

// Where a rank is that looks for the others, or that has failed.
struct Position {
  int64_t number;              // of the round or call
  std::string unit = "round";  // what is counted; empty: it is a call that is not counted
  bool everyone = false;       // also describe ranks in the same round
  int64_t needed = number;     // a rank that exited after fewer rounds is a cause
  int peer = -1;               // the rank that was waited for, which comes first; -1: all
};

// Who looks: a seat, its members by their rank in the group, and which of them this rank is.
struct Looker {
  std::string seat;
  std::vector<int> members;
  int rank;
};

// One sentence per rank, without a full stop.
struct OtherRanks {
  // Ranks that are silent, behind or ahead; if there are none, ranks in the same round that are
  // still computing, and so are waited for. Then the addresses that ranks do not reach.
  std::vector<std::string> causes;
  std::vector<std::string> present;  // with Position::everyone, ranks in the same round
  std::vector<std::string> failed;   // ranks that failed too
  std::string nobody;                // a sentence for the case that there are none
  bool store_is_silent = false;      // then `nobody` says so
};

// A sentence for the `addresses` from which a rank hears no acknowledgement.
std::string lost_path(int rank, const std::string& addresses);

// Those of all members that are in a snapshot.
std::vector<std::string> lost_paths(const Snapshot& seen, const Looker& me);

// Compares two snapshots that are more than a heartbeat apart, for a rank that is at `here`.
OtherRanks where_others_are(const Snapshot& before, const Snapshot& after, const Looker& me,
                            const Position& here);

// The members that are in `silent`, the heartbeats of ranks that have not beaten for a while.
// Nothing is said of the others.
OtherRanks where_silent_are(const Snapshot& silent, const Looker& me, const Position& here);

// All of it in one sentence, for a rank that has not failed.
std::string in_words(const OtherRanks& others);

// Why the wait of this rank at `here` cannot end, if that is certain: a member that has not come
// has exited, or is blocked at a seat at which this rank's blocked thread would have to come
// first. `own`: this rank's positions.
std::optional<std::string> never_comes(const Snapshot& before, const Snapshot& after,
                                       const Looker& me, const Heartbeat& own);

}  // namespace bagua
