// A thread that averages weights every now and then, while training goes on.
#pragma once

#include <chrono>
#include <memory>
#include <optional>

#include "base/clock.h"
#include "base/owner_process.h"
#include "base/weight_gate.h"
#include "engine/engine.h"
#include "engine/lane.h"
#include "op/contract/periodic_op.h"

namespace bagua {

struct PeriodicLaneOptions {
  std::chrono::milliseconds interval;  // from the end of a round to the begin of the next
  std::chrono::milliseconds timeout;   // of a pause, until the others have asked for it too
  std::shared_ptr<Clock> clock = std::make_shared<SteadyClock>();  // of the interval
};

// Between resume() and pause() a thread runs the op, waits for the interval, and so on. A round is
// something that all ranks make together; what one rank's training does never holds up another's,
// but a rank whose training stays inside the gate holds up the lanes.
//
// Thread safety: resume(), pause(), enter(), leave() from the training thread; stats(), stop() from
// any. Ownership: shares op and communicator with nobody else; the thread keeps them alive. May
// fail: an error in the op ends the rounds for good and is published; check() and resume() throw it
// from then on, pause() if nobody has thrown it yet.
class PeriodicLane {
 public:
  // `lane`: with the op's communicator, and without one for agreements.
  PeriodicLane(std::shared_ptr<PeriodicOp> op, std::shared_ptr<WeightGate> gate, LaneOptions lane,
               PeriodicLaneOptions options);
  ~PeriodicLane();
  PeriodicLane(const PeriodicLane&) = delete;
  PeriodicLane& operator=(const PeriodicLane&) = delete;

  // Starts the rounds. Every rank calls it; those that have wait in their first round for the
  // others. Does nothing while running, and on a rank that has no others.
  void resume();

  // Ends the rounds once every rank has asked for it: until then rounds go on. Leaves the gate.
  void ask_to_pause();

  // Asks, and returns true once the rounds have ended; false if they have not within `limit`.
  // Without a limit TimeoutError after the options' timeout: says where the others are.
  bool pause(std::optional<std::chrono::milliseconds> limit = std::nullopt);

  bool running() const;

  // Throws the failure that ended the rounds.
  void check();

  // The gate, from training's side: Note [Gate].
  void enter();
  void leave();
  bool inside() const;

  // Whether training keeps the lane outside the gate.
  bool at_gate() const;

  // Ends this rank's part without asking the others, whose next round fails. Idempotent.
  void stop() noexcept;

  // `rounds` counts averages applied; waiting_ns is the lane's time before the gate, exposed_ns
  // training's.
  EngineStats stats() const;

 private:
  struct State;
  [[noreturn]] void throw_not_paused(int64_t rounds);

  OwnersOnly<std::shared_ptr<State>> state_;
};

}  // namespace bagua
