#include "health/heartbeat.h"

#include <sstream>

#include "base/check.h"
#include "health/sanitize.h"

namespace bagua {
namespace {

using Seen = std::optional<Heartbeat>;

std::string counted(int64_t count, const std::string& unit) {
  return concat(count, " ", unit, count == 1 ? "" : "s");
}

// Difference of any two numbers, saturated.
int64_t rounds_apart(int64_t more, int64_t less) {
  int64_t difference = 0;
  return __builtin_sub_overflow(more, less, &difference) ? INT64_MAX : difference;
}

// Empty for a rank that is there, in the same round.
std::string what_is_wrong(const Seen& before, const Seen& after, const Position& here) {
  if (!after) return " has sent no heartbeat";
  const int64_t round = after->where.round;
  const std::string place = concat(here.unit, " ", round, ": ", after->where.text);
  if (before && before->number == after->number) {
    return concat(" was killed, stopped or cut off: silent for over a second, last in ", here.unit,
                  " ", round, " (", after->where.text, ")");
  }
  if (round < here.number) {
    const std::string apart = counted(rounds_apart(here.number, round), here.unit);
    return concat(" is ", apart, " behind, in ", place);
  }
  if (round > here.number) {
    const std::string apart = counted(rounds_apart(round, here.number), here.unit);
    return concat(" is ", apart, " ahead, in ", place);
  }
  return here.everyone ? concat(" is also in ", place) : "";
}

// In the same round, at both looks, and at work of its own.
std::string what_keeps(const Seen& before, const Seen& after, const Position& here) {
  if (!before || !after) return "";
  const Whereabouts &then = before->where, &now = after->where;
  if (then.waits || now.waits || then.round != here.number || now.round != here.number) {
    return "";
  }
  return concat(" is still in ", here.unit, " ", now.round, ": ", now.text);
}

}  // namespace

std::string heartbeat_text(const Heartbeat& beat) {
  const Whereabouts& where = beat.where;
  return concat(beat.number, " ", where.round, " ", where.waits ? 1 : 0, " ", where.text);
}

std::optional<Heartbeat> parse_heartbeat(const std::string& written) {
  std::istringstream stream(written);
  Heartbeat beat;
  int waits = 0;
  if (!(stream >> beat.number >> beat.where.round >> waits) || beat.where.round < 0) {
    return std::nullopt;
  }
  beat.where.waits = waits != 0;
  std::getline(stream >> std::ws, beat.where.text);
  beat.where.text = sanitize_untrusted(beat.where.text);
  return beat;
}

OtherRanks where_others_are(const Snapshot& before, const Snapshot& after, int rank,
                            const Position& here) {
  std::vector<std::string> wrong, keeping, failed;
  const auto add = [](std::vector<std::string>& list, size_t rank, const std::string& what) {
    if (!what.empty()) list.push_back(concat("rank ", rank, what));
  };
  for (size_t other = 0; other < after.beats.size(); ++other) {
    if (static_cast<int>(other) == rank) continue;
    const Seen &then = before.beats[other], &now = after.beats[other];
    if (now && after.failed.contains(static_cast<int>(other))) {
      add(failed, other, concat(" has failed too, in ", here.unit, " ", now->where.round));
    } else {
      add(wrong, other, what_is_wrong(then, now, here));
      add(keeping, other, what_keeps(then, now, here));
    }
  }
  return {.causes = wrong.empty() ? keeping : wrong,
          .failed = failed,
          .nobody = "No rank is silent, behind or ahead."};
}

std::string in_words(const OtherRanks& others) {
  std::string places;
  for (const auto& list : {others.causes, others.failed}) {
    for (const std::string& rank : list) places += (places.empty() ? "" : "; ") + rank;
  }
  return places.empty() ? others.nobody : concat("Where the others are: ", places, ".");
}

}  // namespace bagua
