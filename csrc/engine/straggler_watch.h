// Tells who is waited for, long before a timeout does.
#pragma once

#include <chrono>
#include <memory>
#include <string>

#include "comm/failure_board.h"
#include "engine/engine.h"

namespace bagua {

// One wait of one thread. It never delays that wait by more than what the store takes to answer:
// the two looks at the heartbeats lie between the waiter's own looks at what it waits for.
class StragglerWatch {
 public:
  // `options` outlives the watch. what: is waited for.
  StragglerWatch(const EngineOptions& options, const char* what);

  // Now and then while waiting. me: who waits, in which round.
  void look(const std::string& me, int64_t round);

  // Whether somebody has been told, who must be told the end too.
  bool reported() const { return reported_; }

  // The wait has come to a good end.
  void over(const std::string& me) const;

 private:
  using Clock = std::chrono::steady_clock;
  std::string seconds() const;

  const EngineOptions& options_;
  const char* const what_;
  const Clock::time_point start_ = Clock::now();
  std::chrono::milliseconds next_;  // how long the wait has lasted when it is told next
  std::shared_ptr<const Look> before_;
  Clock::time_point looked_{};
  bool reported_ = false;
};

}  // namespace bagua
