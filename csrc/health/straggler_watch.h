// Tells who is waited for, long before a timeout does.
#pragma once

#include <chrono>
#include <cstdint>
#include <memory>
#include <string>

#include "health/failure_board.h"

namespace bagua {

// One wait of one thread. It never delays that wait by more than what the store takes to answer:
// the two looks at the heartbeats lie between the waiter's own looks at what it waits for.
class StragglerWatch {
 public:
  // `what`: name of the awaited event. `timeout`: of the wait. `board`: null if there are no
  // heartbeats to look at, and so nothing to report.
  StragglerWatch(const StragglerReports& reports, std::shared_ptr<FailureBoard> board,
                 std::chrono::milliseconds timeout, const char* what);

  // Now and then while waiting. me: who waits, in which round.
  void look(const std::string& me, int64_t round);

  // Whether somebody has been told, who must be told the end too.
  bool reported() const { return reported_; }

  // The wait has come to a good end.
  void over(const std::string& me) const;

 private:
  std::string seconds() const;

  const StragglerReports reports_;
  const std::shared_ptr<FailureBoard> board_;
  const std::chrono::milliseconds timeout_;
  const char* const what_;
  const std::chrono::milliseconds start_;  // on the clock
  std::chrono::milliseconds next_;         // how long the wait has lasted when it is told next
  std::shared_ptr<const Snapshot> before_;
  std::chrono::milliseconds looked_{0};  // on the clock
  bool reported_ = false;
};

}  // namespace bagua
