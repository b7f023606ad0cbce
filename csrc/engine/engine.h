// Turns ready slots into communication: order, lanes, rounds and errors.
#pragma once

#include <chrono>
#include <cstdint>
#include <functional>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "base/check_signals.h"
#include "base/owner_process.h"
#include "comm/counting_communicator.h"
#include "engine/accounting.h"
#include "engine/bucket.h"
#include "engine/rank_samples.h"
#include "health/failure_board.h"
#include "health/straggler_watch.h"

namespace bagua {

class WeightsSample;

// One communication thread: its buckets, in launch order, and the communicators their ops use.
struct Lane {
  std::vector<Bucket> buckets;
  CountingCommunicators communicators;
};

struct EngineOptions {
  std::string name;      // of the module, for error messages and threads
  uint64_t fingerprint;  // of the plan; equal on all ranks or no round starts
  uint64_t incarnation;
  std::chrono::milliseconds timeout;
  std::shared_ptr<CountingCommunicator> control;  // CPU; for agreements and masks only
  std::shared_ptr<FailureBoard> board;            // null: failures of other ranks are not seen
  StragglerReports stragglers{};
  std::shared_ptr<WeightsSample> weights{};  // compared in each round; null: no weights are
  CheckSignals check_signals{};  // while the caller waits; what it throws ends the engine
};

// Start of a round on this rank.
struct RoundOpening {
  float grad_scale = 1.0f;  // the factor that its gradients carry
  uint64_t frozen = 0;      // AgreementRecord::frozen
  // False: this rank's weights need not be the others' now, and its zeros are of no samples.
  bool has_inputs = true;
  std::optional<int32_t> part{};  // only buckets of it take part; equal on all ranks
  RankSamples samples{};
  // The number is that of the next call for this round; `said`: there may be one. Note [Late
  // samples]
  bool samples_later = false;
};

// Note [Late samples]
// Buffers may be given before the forward that opens the round: in no_sync(), or in an evaluation.
// Messages need the ranks' agreement, which then opens the round before the number of samples is
// known, on some ranks or on all. If some rank weighs by samples, all ranks send their records
// again when they know it, and buckets wait for that; elsewhere it costs nothing.

// Sums over all rounds since construction. Times in nanoseconds of the wall clock: OverlapClock.
struct EngineStats {
  std::vector<BucketStats> buckets;
  Traffic control;
  int64_t rounds;
  int64_t busy_ns;          // at least one lane was running a bucket
  int64_t hidden_ns;        // of that, while the caller was not blocked: the overlap won
  int64_t exposed_ns;       // the caller was blocked: in wait(), and until the ranks agreed
  int64_t longest_wait_ns;  // of exposed_ns, the longest stretch
};

using SlotId = int32_t;

// Thread safety: mark_ready() from any thread (autograd's); begin_round(), wait() from one thread
// at a time; abort(), stats() from any. Ownership: sole owner of the communicators
// and ops; lane threads keep them alive while they run. Ordering: Note [Launch order], Note
// [Agreement], Note [Rounds]. May fail: an error in a lane is stored, rethrown by wait() and
// begin_round(), published to the other ranks, and the engine refuses further work.
//
// Note [Streams]
// On a device every lane has a separate stream. A slot that is marked ready is written by work of
// the marking thread's current stream; when a bucket is full, its lane's stream waits for all such
// streams. wait() returns once everything has been enqueued, and makes the caller's current stream
// wait for the lanes' streams: no host thread waits for what the device was given in this round; an
// op that must look at a value reads it in its next round. A failure on the device is therefore
// thrown by a later begin_round(), wait() or settle(); what a failed round leaves in its buckets is
// NaN, see Note [Aborted collectives]. One event per bucket and stream covers all slots that
// were marked on that stream before; an event per slot would cost a microsecond each and order
// nothing more.
// Memory that a lane allocates belongs to its stream. Buckets and the state of ops are allocated
// on the caller's stream, and are freed by a caller whose stream waits for the lanes by wait(),
// and by stop() for a round that was left; so the caching allocator cannot hand them out too early
// and record_stream is not needed. A caller that changes streams between wait() and the end of the
// model orders its streams itself, as with any tensor. On CPU there are no streams and no events.
class Engine {
 public:
  Engine(std::vector<Lane> lanes, EngineOptions options);
  ~Engine();
  Engine(const Engine&) = delete;
  Engine& operator=(const Engine&) = delete;

  // Throws in a forked child, which has no lanes and must leave the parent's communicators alone.
  // So do all calls that take part in a round.
  void check_process() const;

  // Opens a round and starts the agreement in the background. Reads the weights that are sampled.
  void begin_round(const RoundOpening& opening = {});

  // A forward begins that opens no round: if none is open, the present weights count as
  // those of the next round too. Note [Sample of the weights]
  void note_forward();

  // Blocks until the ranks agree on the open round.
  void await_agreement();

  // Whether the values of the round, once the ranks have agreed, are weighed by samples.
  bool by_samples() const;

  // The factor of this rank's values in the round that was begun last, once the ranks have agreed:
  // Note [Weights of ranks].
  double weight() const;

  // True if a round is open and not all of its buckets are done.
  bool round_open() const;
  int64_t round() const;

  // False if the slot had been marked in this round already.
  bool mark_ready(SlotId slot);

  // Marks every slot that has not been marked in this round.
  void mark_all();

  // Whether the slot has been marked in this round: its bucket may be running, hands off.
  bool marked(SlotId slot) const;

  // Exchanges the slots that any rank used: starts once every slot is marked; wait() covers it.
  void exchange_used(std::vector<uint8_t> used);

  // The result of exchange_used, valid after wait(): 1 where any rank used the slot.
  const std::vector<uint8_t>& used() const;

  // Blocks until every bucket of the round is done. Throws the stored failure, another rank's
  // failure as soon as it is published, or TimeoutError at the deadline.
  void wait();

  // Blocks until the device is done with what the lanes were given, and throws a failure of it that
  // no call has thrown: the end of Note [Streams]. On CPU there is nothing to wait for.
  void settle();

  // Throws the diagnosis of a failure outside the lanes in this round, on a communicator of the
  // main thread.
  [[noreturn]] void fail(const std::string& reason, bool timed_out);

  // Autograd has thrown `error` in the open round. If the engine is stopped in this round, the
  // other ranks are told of the error and not of an exit.
  void note_error(const std::exception_ptr& error) noexcept;

  // Ends everything: wait() and later calls throw `reason` on this and, published, on other ranks.
  void abort(const std::string& reason) noexcept;

  // Stops the lanes. Called by the destructor; idempotent. `agreed`: all ranks do so after the same
  // round, which costs no request to the store.
  void stop(bool agreed = false) noexcept;

  EngineStats stats() const;
  const Bucket& bucket(size_t index) const;
  size_t buckets() const;
  size_t slots() const;

 private:
  struct State;
  void mark(size_t slot);  // under the lock

  OwnersOnly<std::shared_ptr<State>> state_;
};

}  // namespace bagua
