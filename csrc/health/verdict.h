// A verdict about lost ranks: one of many ranks looks for them, on behalf of all.
#pragma once

#include <memory>

#include "health/heartbeat.h"

namespace bagua {

class Board;

// Note [Verdicts]
// Where one of many ranks is lost, the others look for it at one moment, and P looks at P
// heartbeats keep the store busy for longer than a rank may be silent. So of more than kMostLooking
// ranks one looks: the first that writes "?<rank>" under kVerdictKey. It writes there which ranks
// are silent, and the numbers of their heartbeats. Each of the others reads these heartbeats, and
// takes the verdict where they have the same numbers: such a rank has not beaten since. If the
// verdict does not come, or nobody is silent, they look as few ranks do.
inline constexpr int kMostLooking = 64;
inline constexpr const char* kVerdictKey = "silent";

struct Verdict {
  std::shared_ptr<const Snapshot> silent{};  // heartbeats of silent ranks alone; null: look
  bool for_all = false;                      // this rank looks for all
};

// Waits for the rank that looks, at most kUntilVerdict and its own requests.
Verdict await_verdict(Board& board) noexcept;

// Called by the rank that has looked for all; null: the store did not answer.
void write_verdict(Board& board, const std::shared_ptr<const Snapshot>& before,
                   const std::shared_ptr<const Snapshot>& after) noexcept;

}  // namespace bagua
