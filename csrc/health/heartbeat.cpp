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
std::string what_is_wrong(const Seen& before, const Seen& after, const Observer& observer) {
  if (!after) return " has sent no heartbeat";
  const int64_t round = after->where.round;
  const std::string place = concat(observer.unit, " ", round, ": ", after->where.text);
  if (before && before->number == after->number) {
    return concat(" was killed, stopped or cut off: silent for over a second, last in ",
                  observer.unit, " ", round, " (", after->where.text, ")");
  }
  if (round < observer.round) {
    const std::string apart = counted(rounds_apart(observer.round, round), observer.unit);
    return concat(" is ", apart, " behind, in ", place);
  }
  if (round > observer.round) {
    const std::string apart = counted(rounds_apart(round, observer.round), observer.unit);
    return concat(" is ", apart, " ahead, in ", place);
  }
  return observer.everyone ? concat(" is also in ", place) : "";
}

// In the same round, at both looks, and at work of its own.
std::string what_keeps(const Seen& before, const Seen& after, const Observer& observer) {
  if (!before || !after) return "";
  const Whereabouts &then = before->where, &now = after->where;
  if (then.waits || now.waits || then.round != observer.round || now.round != observer.round) {
    return "";
  }
  return concat(" is still in ", observer.unit, " ", now.round, ": ", now.text);
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

OtherRanks where_others_are(const Snapshot& before, const Snapshot& after,
                            const Observer& observer) {
  std::vector<std::string> wrong, keeping, failed;
  const auto add = [](std::vector<std::string>& list, size_t rank, const std::string& what) {
    if (!what.empty()) list.push_back(concat("rank ", rank, what));
  };
  for (size_t rank = 0; rank < after.beats.size(); ++rank) {
    if (static_cast<int>(rank) == observer.rank) continue;
    const Seen &then = before.beats[rank], &now = after.beats[rank];
    if (now && after.failed.contains(static_cast<int>(rank))) {
      add(failed, rank, concat(" has failed too, in ", observer.unit, " ", now->where.round));
    } else {
      add(wrong, rank, what_is_wrong(then, now, observer));
      add(keeping, rank, what_keeps(then, now, observer));
    }
  }
  return {.causes = wrong.empty() ? keeping : wrong,
          .failed = failed,
          .nobody = "No rank is silent, behind or ahead."};
}

}  // namespace bagua
