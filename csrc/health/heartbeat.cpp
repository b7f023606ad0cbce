#include "health/heartbeat.h"

#include <algorithm>
#include <charconv>
#include <string_view>
#include <utility>

#include "base/check.h"
#include "health/sanitize.h"

namespace bagua {
namespace {

using Seen = std::optional<Heartbeat>;

constexpr size_t kMostTextBytes = 160, kMostHeadBytes = 100;
constexpr char kSeparator = '\x1f';  // between head and text
constexpr const char* kMore = "...";
constexpr const char* kExited = "exited";
constexpr std::string_view kUnreached = "unreached ";
// Bits of a position's state.
constexpr int kWaits = 1, kBlocked = 2, kFailed = 4;

std::string counted(int64_t count, const std::string& unit) {
  return concat(count, " ", unit, count == 1 ? "" : "s");
}

// Difference of any two numbers, saturated.
int64_t rounds_apart(int64_t more, int64_t less) {
  int64_t difference = 0;
  return __builtin_sub_overflow(more, less, &difference) ? INT64_MAX : difference;
}

std::string one_line(std::string text, size_t most_bytes) {
  if (text.size() > most_bytes) text.resize(most_bytes);
  std::replace(text.begin(), text.end(), '\n', ' ');
  return text;
}

std::string text_of(const SeatPosition& position) {
  const Whereabouts& where = position.where;
  const int state = (where.waits ? kWaits : 0) | (where.blocked != 0 ? kBlocked : 0) |
                    (position.failed ? kFailed : 0);
  const std::string named = position.seat.empty() ? "" : position.seat + " ";
  const std::string head =
      position.head.empty() ? "" : one_line(position.head, kMostHeadBytes) + kSeparator;
  return concat(named, where.round, " ", state, " ", head, one_line(where.text, kMostTextBytes));
}

void skip_spaces(std::string_view& text) {
  text.remove_prefix(std::min(text.find_first_not_of(" \t\r\n\v\f"), text.size()));
}

// Takes what stands before `end` from the front of `text`, and `end`.
std::string_view take_until(std::string_view& text, char end) {
  const std::string_view taken = text.substr(0, text.find(end));
  text.remove_prefix(std::min(taken.size() + 1, text.size()));
  return taken;
}

template <typename Number>
bool take_number(std::string_view& text, Number& number) {
  skip_spaces(text);
  const auto [end, error] = std::from_chars(text.data(), text.data() + text.size(), number);
  if (error != std::errc{}) return false;
  text.remove_prefix(end - text.data());
  return true;
}

std::optional<SeatPosition> parse_position(std::string_view line, bool named) {
  SeatPosition position;
  int state = 0;
  if (named) {
    skip_spaces(line);
    position.seat = sanitize_untrusted(take_until(line, ' '));
    if (position.seat.empty()) return std::nullopt;
  }
  if (!take_number(line, position.where.round) || !take_number(line, state)) return std::nullopt;
  if (position.where.round < 0) return std::nullopt;
  position.where.waits = (state & kWaits) != 0;
  position.where.blocked = (state & kBlocked) != 0 ? 1 : 0;
  position.failed = (state & kFailed) != 0;
  skip_spaces(line);
  if (line.find(kSeparator) != line.npos) {
    position.head = sanitize_untrusted(take_until(line, kSeparator));
    skip_spaces(line);
  }
  position.where.text = sanitize_untrusted(line);
  return position;
}

std::string in_full(const SeatPosition& position) {
  return position.head.empty() ? position.where.text
                               : concat(position.head, ": ", position.where.text);
}

int rank_of(const SeatPosition& position) {
  return position.where.blocked != 0 ? 2 : position.where.waits ? 1 : 0;
}

// At another seat: where the rank is blocked, else where it waits, else the last one.
const SeatPosition* elsewhere(const Heartbeat& beat, const std::string& seat) {
  const SeatPosition* found = nullptr;
  for (const SeatPosition& one : beat.positions) {
    if (one.seat != seat && (!found || rank_of(one) >= rank_of(*found))) found = &one;
  }
  return found;
}

// ", and waits in round 3 of module 'Net': ..." of a rank that waits at another seat.
std::string waits_elsewhere(const Heartbeat& beat, const std::string& seat) {
  const SeatPosition* other = elsewhere(beat, seat);
  if (!other || rank_of(*other) < 2) return "";
  return concat(", and waits in ", in_full(*other));
}

std::string not_here(const Heartbeat& beat, const Looker& me, const Position& here) {
  const std::string missing =
      concat(" has not come to this ", here.unit.empty() ? "call" : here.unit);
  const SeatPosition* other = elsewhere(beat, me.seat);
  if (!other && here.unit.empty()) other = beat.at(me.seat);  // a call before this one
  if (!other) return beat.more ? concat(missing, ", as far as it can be seen") : missing;
  const char* in = rank_of(*other) > 0   ? ": it waits in "
                   : other->head.empty() ? ": its last call was "
                                         : ": it is in ";
  return concat(missing, in, in_full(*other));
}

std::string silent(const Heartbeat& beat, const Looker& me, const Position& here) {
  const std::string lost =
      " was killed, stopped or cut off, or left by os._exit(): silent for over a second";
  const SeatPosition* position = beat.at(me.seat);
  if (position && !here.unit.empty()) {
    return concat(lost, ", last in ", here.unit, " ", position->where.round, " (",
                  position->where.text, ")");
  }
  if (!position) position = elsewhere(beat, me.seat);
  return position ? concat(lost, ", last in ", in_full(*position)) : lost;
}

// The cause for a call that is not counted for users; empty: the rank is there.
std::string in_another_call(const Heartbeat& beat, const SeatPosition& position, const Looker& me,
                            const Position& here) {
  if (position.where.round < here.number) return not_here(beat, me, here);
  if (position.where.round > here.number) {
    return concat(" is past this call, ", position.where.waits ? "in " : "after ",
                  position.where.text);
  }
  return "";
}

// Empty for a rank that is there, in the same round.
std::string what_is_wrong(const Seen& before, const Seen& after, const Looker& me,
                          const Position& here) {
  if (!after) return " has sent no heartbeat";
  if (after->exited) return " has exited";
  if (before && before->number == after->number) return silent(*after, me, here);
  const SeatPosition* position = after->at(me.seat);
  if (!position) return not_here(*after, me, here);
  if (here.unit.empty()) return in_another_call(*after, *position, me, here);
  const int64_t round = position->where.round;
  if (round == here.number) return "";
  const std::string place = concat(here.unit, " ", round, ": ", position->where.text);
  if (round < here.number) {
    const std::string apart = counted(rounds_apart(here.number, round), here.unit);
    return concat(" is ", apart, " behind, in ", place, waits_elsewhere(*after, me.seat));
  }
  const std::string apart = counted(rounds_apart(round, here.number), here.unit);
  return concat(" is ", apart, " ahead, in ", place);
}

// The place of a rank that has come to the same round.
std::string is_present(const SeatPosition* position, const Position& here) {
  if (!here.everyone || !position || position->where.round != here.number) return "";
  if (here.unit.empty()) return " has reached the same call";
  return concat(" is also in ", here.unit, " ", here.number, ": ", position->where.text);
}

// In the same round, at both looks, and computing.
std::string what_keeps(const Seen& before, const Seen& after, const Looker& me,
                       const Position& here) {
  const SeatPosition* then = before ? before->at(me.seat) : nullptr;
  const SeatPosition* now = after ? after->at(me.seat) : nullptr;
  if (!then || !now || here.unit.empty()) return "";
  if (then->where.waits || now->where.waits || then->where.round != here.number ||
      now->where.round != here.number) {
    return "";
  }
  return concat(" is still in ", here.unit, " ", now->where.round, ": ", now->where.text,
                waits_elsewhere(*after, me.seat));
}

// The seat at which the member is blocked at both looks, waiting for the thread that is blocked
// here.
const SeatPosition* waits_for_us(const Heartbeat& before, const Heartbeat& after, const Looker& me,
                                 const Heartbeat& own) {
  const SeatPosition* mine = own.at(me.seat);
  for (const SeatPosition& theirs : after.positions) {
    const SeatPosition* then = before.at(theirs.seat);
    const SeatPosition* ours = own.at(theirs.seat);
    if (theirs.seat == me.seat || !then || !ours || !mine) continue;
    const bool stays = then->where.blocked != 0 && theirs.where.blocked != 0 &&
                       then->where.round == theirs.where.round;
    const bool needs_us =
        ours->where.round < theirs.where.round && ours->where.driven_by == mine->where.blocked;
    if (stays && needs_us) return &theirs;
  }
  return nullptr;
}

}  // namespace

std::string lost_path(int rank, const std::string& addresses) {
  return concat("rank ", rank, " hears no acknowledgement from ", addresses,
                ": packets are lost on the way there or back");
}

std::vector<std::string> lost_paths(const Snapshot& seen, const Looker& me) {
  std::vector<std::string> lost;
  for (size_t rank = 0; rank < me.members.size(); ++rank) {
    const Seen& beat = seen.beats.at(me.members[rank]);
    if (!beat || beat->unreached.empty()) continue;
    lost.push_back(lost_path(static_cast<int>(rank), beat->unreached));
  }
  return lost;
}

std::string beat_key(int rank) { return concat("beat/", rank); }

const SeatPosition* Heartbeat::at(const std::string& seat) const {
  for (const SeatPosition& one : positions) {
    if (one.seat == seat) return &one;
  }
  return nullptr;
}

// The number and the position of the seat without a name, if there is one; a line for each other
// seat, those that wait first.
std::string heartbeat_text(const Heartbeat& beat) {
  std::string text = std::to_string(beat.number);
  if (const SeatPosition* only = beat.at("")) text += " " + text_of(*only);
  if (beat.exited) text += concat("\n", kExited);
  if (!beat.unreached.empty()) {
    text += concat("\n", kUnreached, one_line(beat.unreached, kMostTextBytes));
  }
  bool more = beat.more;
  for (const int wanted : {2, 1, 0}) {
    for (const SeatPosition& one : beat.positions) {
      if (one.seat.empty() || rank_of(one) != wanted) continue;
      const std::string line = "\n" + text_of(one);
      if (text.size() + line.size() + 4 <= kMostBeatBytes) {
        text += line;
      } else {
        more = true;
      }
    }
  }
  return more ? concat(text, "\n", kMore) : text;
}

// Every rank reads those of all others when one is lost.
std::optional<Heartbeat> parse_heartbeat(std::string_view written) {
  if (written.size() > kMostBeatBytes) return std::nullopt;
  std::string_view first = take_until(written, '\n');
  Heartbeat beat;
  if (!take_number(first, beat.number)) return std::nullopt;
  skip_spaces(first);
  if (!first.empty()) {
    auto only = parse_position(first, /*named=*/false);
    if (!only) return std::nullopt;
    beat.positions.push_back(std::move(*only));
  }
  while (!written.empty()) {
    const std::string_view line = take_until(written, '\n');
    if (line == kMore) {
      beat.more = true;
    } else if (line == kExited) {
      beat.exited = true;
    } else if (line.starts_with(kUnreached)) {
      beat.unreached = sanitize_untrusted(line.substr(kUnreached.size()));
    } else if (auto position = parse_position(line, /*named=*/true)) {
      beat.positions.push_back(std::move(*position));
    }
  }
  return beat;
}

OtherRanks where_others_are(const Snapshot& before, const Snapshot& after, const Looker& me,
                            const Position& here) {
  std::vector<std::string> wrong, keeping, present, failed;
  const auto add = [](std::vector<std::string>& list, size_t rank, const std::string& what) {
    if (!what.empty()) list.push_back(concat("rank ", rank, what));
  };
  for (size_t other = 0; other < me.members.size(); ++other) {
    if (static_cast<int>(other) == me.rank) continue;
    const Seen& then = before.beats.at(me.members[other]);
    const Seen& now = after.beats.at(me.members[other]);
    const SeatPosition* position = now ? now->at(me.seat) : nullptr;
    if (position && position->failed) {
      const std::string place =
          here.unit.empty() ? "" : concat(", in ", here.unit, " ", position->where.round);
      add(failed, other, " has failed too" + place);
    } else {
      const std::string cause = what_is_wrong(then, now, me, here);
      add(wrong, other, cause);
      add(keeping, other, what_keeps(then, now, me, here));
      if (cause.empty()) add(present, other, is_present(position, here));
    }
  }
  std::vector<std::string> causes = wrong.empty() ? std::move(keeping) : std::move(wrong);
  for (std::string& path : lost_paths(after, me)) causes.push_back(std::move(path));
  return {.causes = std::move(causes),
          .present = present,
          .failed = failed,
          .nobody = "No rank is silent, behind or ahead."};
}

OtherRanks where_silent_are(const Snapshot& silent, const Looker& me, const Position& here) {
  OtherRanks others;
  for (size_t other = 0; other < me.members.size(); ++other) {
    const Seen& beat = silent.beats.at(me.members[other]);
    if (static_cast<int>(other) == me.rank || !beat) continue;
    const SeatPosition* position = beat->at(me.seat);
    if (position && position->failed) continue;
    others.causes.push_back(concat("rank ", other, what_is_wrong(beat, beat, me, here)));
  }
  return others;
}

std::string in_words(const OtherRanks& others) {
  std::string places;
  for (const auto& list : {others.causes, others.present, others.failed}) {
    for (const std::string& rank : list) places += (places.empty() ? "" : "; ") + rank;
  }
  return places.empty() ? others.nobody : concat("Where the others are: ", places, ".");
}

std::optional<std::string> never_comes(const Snapshot& before, const Snapshot& after,
                                       const Looker& me, const Heartbeat& own) {
  const SeatPosition* mine = own.at(me.seat);
  if (!mine || mine->where.blocked == 0) return std::nullopt;
  for (size_t other = 0; other < me.members.size(); ++other) {
    const Seen& then = before.beats.at(me.members[other]);
    const Seen& now = after.beats.at(me.members[other]);
    if (static_cast<int>(other) == me.rank || !then || !now) continue;
    const SeatPosition* theirs = now->at(me.seat);
    if (theirs && theirs->where.round >= mine->where.round) continue;
    const std::string rank = concat("rank ", other);
    if (now->exited) return concat(rank, " has exited, and takes no part");
    if (const SeatPosition* waits = waits_for_us(*then, *now, me, own)) {
      return concat(rank, " does not make this call: it waits in ", in_full(*waits),
                    ", which this rank has not begun, so that each waits for the other");
    }
  }
  return std::nullopt;
}

}  // namespace bagua
