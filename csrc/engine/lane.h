// The part that all lanes share, whatever decides when their work runs.
#pragma once

#include <chrono>
#include <condition_variable>
#include <cstdint>
#include <exception>
#include <functional>
#include <memory>
#include <mutex>
#include <optional>
#include <string>
#include <vector>

#include "base/check_signals.h"
#include "engine/accounting.h"
#include "engine/lane_thread.h"
#include "health/diagnose.h"
#include "health/failure_board.h"
#include "op/contract/bucket_op.h"

namespace bagua {

struct LaneOptions {
  std::string name;                               // of the module, for error messages
  std::shared_ptr<CountingCommunicator> control;  // CPU; for agreements only; null: there are none
  CountingCommunicators ops;                      // communicators of the ops
  std::shared_ptr<FailureBoard> board{};          // null: failures of other ranks are not seen
  CheckSignals check_signals{};                   // while a caller waits; what it throws ends it
  // Called before a failure is rethrown; may rethrow it as a type that the caller's framework
  // handles. Null: rethrown unchanged.
  std::function<void(const std::exception_ptr&)> on_error{};
};

// Decides how a failure is explained.
enum class FailurePoint : uint8_t {
  kInRound,        // in the round under way
  kBetweenRounds,  // maybe after the last job of a round, before the first one of the next
};

// The threads of a lane, its first failure, and its end. Engine, DynamicLane and PeriodicLane are
// schedulers over it: each derives its state from it, and decides when which ops run.
//
// Thread safety: all methods, from any thread; one with a parameter `lock` needs it held, the
// others need it open. One mutex guards this and the scheduler's state: it is never held while an
// op runs, a future is completed or the store is queried. Ownership: lives as long as the scheduler
// or the last thread that is still blocked in a transport. May fail: the first failure is kept,
// published, and explained once, before a caller gets it (Note [Diagnosis]); all communicators
// refuse further calls then. What fails after stop() is its consequence and changes nothing.
struct LaneCore : std::enable_shared_from_this<LaneCore> {
  explicit LaneCore(LaneOptions options);
  virtual ~LaneCore() = default;
  LaneCore(const LaneCore&) = delete;
  LaneCore& operator=(const LaneCore&) = delete;

  enum class News : uint8_t { kEndWaits, kIgnored };
  // Publishes whereabouts() with the heartbeats. kEndWaits: while they say that this rank waits,
  // the board looks for other ranks' failures, and one that it finds ends the lane.
  void begin(News news, Watched watched = Watched::kNo);

  // Module, rank and place, with which messages begin.
  std::string whoami() const;

  void fail(const std::exception_ptr& cause, FailurePoint point = FailurePoint::kInRound) noexcept;
  void end_with(const std::exception_ptr& cause, const FailureBoard::News& news,
                FailurePoint point = FailurePoint::kInRound) noexcept;
  // A difference between the ranks, which each of them finds by itself.
  void end_with(const MismatchError& difference) noexcept;
  // Fails, and throws the failure; the cause itself after stop().
  [[noreturn]] void fail_and_throw(std::unique_lock<std::mutex>& lock,
                                   const std::exception_ptr& cause);

  // Fails if work that was put on a device has.
  void check_communicators() noexcept;

  // The failure as callers get it; there is one.
  std::exception_ptr explained() noexcept;
  [[noreturn]] void rethrow(std::unique_lock<std::mutex>& lock);

  // Blocks until `done` holds under the lock; false at the deadline. The time counts as exposed.
  // `what`: the awaited event.
  // `between`: called now and then without the lock; may be null. What check_signals throws ends
  // the lane, and is thrown.
  using Deadline = std::chrono::steady_clock::time_point;
  bool await(std::unique_lock<std::mutex>& lock, Deadline deadline,
             const std::function<bool()>& done, const char* what,
             const std::function<void()>& between = nullptr);

  // Publishes the exit, or the error that led to it, and ends the threads. If one has to be left in
  // a transport, the communicators are aborted with `reason`. False if it was called before.
  // `agreed`: all ranks stop after the same round, so that nobody will ask for this rank's exit.
  bool stop(const std::string& reason, bool agreed = false) noexcept;
  void abort_communicators(const std::string& reason) const noexcept;

  // The scheduler's part. position(), rounds_done(), error_of_caller(): under the lock.
  virtual Whereabouts whereabouts() const = 0;
  virtual std::string place() const = 0;                      // "round 3"
  virtual Position position() const = 0;                      // of a failure that is met now
  virtual int64_t rounds_done() const = 0;                    // in which all ranks took part
  virtual std::string error_of_caller() const { return ""; }  // that leads to stop()
  virtual void interrupt() noexcept {}                        // ends an op that waits for this rank
  virtual void on_failure() noexcept {}                       // the lane has failed

  const LaneOptions core;
  const Group group;
  mutable std::mutex mutex;
  std::condition_variable changed;
  std::exception_ptr failure;  // as it came
  bool stopped = false;
  OverlapClock clock;
  std::vector<std::unique_ptr<LaneThread>> threads;

 private:
  void on_news(const FailureBoard::News& news);
  std::exception_ptr explain() const noexcept;

  Blame blame_{};                      // of the failure
  std::optional<Position> failed_at_;  // where it was met
  std::once_flag explained_once_;
  std::exception_ptr explained_;
  std::unique_ptr<LaneThread> teller_;  // ends the lane with news that the board's thread found
};

// The ops of a bucket, and the communicators that they use.
struct LaneWork {
  at::Tensor& flat;
  const std::vector<std::shared_ptr<BucketOp>>& ops;
  const CountingCommunicators& communicators;
  Round round;
};

// Runs `before`, then the ops, and looks whether the result is finite: one pass over memory that
// has just been written. None on a device, where it would wait. An error names the bucket and the
// op.
std::optional<bool> run_ops(const LaneWork& work, const std::function<void()>& before);

}  // namespace bagua
