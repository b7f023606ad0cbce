#include "engine/periodic.h"

#include <algorithm>
#include <exception>
#include <mutex>
#include <utility>

#include <ATen/record_function.h>

#include "base/check.h"
#include "comm/device_stream.h"
#include "engine/accounting.h"
#include "health/failure.h"

namespace bagua {

namespace {

constexpr const char* kOwned = "asynchronous averaging";

LaneOptions checked_lane(const PeriodicOp* op, const WeightGate* gate, LaneOptions lane,
                         const PeriodicLaneOptions& options) {
  BAGUA_CHECK_ARG(op && gate && lane.ops.size() == 1 && lane.ops[0] && options.clock,
                  "a periodic lane needs an op, a gate, a communicator and a clock.");
  BAGUA_CHECK_ARG(options.interval.count() >= 0, "the interval of a periodic lane is ",
                  options.interval.count(), " ms; it must be 0 or more.");
  return lane;
}

}  // namespace

// Rounds one after the other, from resume() to the moment at which all ranks want to pause.
struct PeriodicLane::State final : LaneCore {
  State(std::shared_ptr<PeriodicOp> lane_op, std::shared_ptr<WeightGate> lane_gate,
        LaneOptions lane, PeriodicLaneOptions lane_options);

  const std::shared_ptr<PeriodicOp> op;
  const std::shared_ptr<WeightGate> gate;
  const PeriodicLaneOptions options;

  bool running = false;
  bool wants_to_pause = false;
  bool failure_known = false;  // to the training thread
  int64_t rounds = 0;          // in which all ranks took part, to tell others how far this one got
  int64_t averages = 0;
  int64_t nonfinite = 0;  // averages
  // All three of whole rounds, so that they go together.
  int64_t rounds_ns = 0;
  int64_t waited_ns = 0;  // at the gate
  Traffic traffic;

  Whereabouts whereabouts() const override;
  std::string place() const override { return kOwned; }
  Position position() const override { return {.number = rounds, .needed = rounds + 1}; }
  int64_t rounds_done() const override { return rounds; }
  void interrupt() noexcept override { gate->close(); }

  void loop();
  bool run_round();
};

PeriodicLane::State::State(std::shared_ptr<PeriodicOp> lane_op,
                           std::shared_ptr<WeightGate> lane_gate, LaneOptions lane,
                           PeriodicLaneOptions lane_options)
    : LaneCore(checked_lane(lane_op.get(), lane_gate.get(), std::move(lane), lane_options)),
      op(std::move(lane_op)),
      gate(std::move(lane_gate)),
      options(std::move(lane_options)) {
  threads.push_back(std::make_unique<LaneThread>("bagua-average"));
}

Whereabouts PeriodicLane::State::whereabouts() const {
  const std::lock_guard lock(mutex);
  if (gate->lane_waits()) return {rounds, false, "a training step has not ended"};
  if (wants_to_pause) return {rounds, true, "has asked to end averaging"};
  return {rounds, true, running ? "averaging, has not asked to end it" : "not averaging"};
}

bool PeriodicLane::State::run_round() {
  bool pause = false;
  {
    std::lock_guard lock(mutex);
    pause = wants_to_pause;
  }
  const int64_t start = now_ns();
  const PeriodicOp::Made made = op->run(pause);
  const bool averaged = made != PeriodicOp::Made::kNothing;
  std::lock_guard lock(mutex);
  ++rounds;
  if (averaged) ++averages;
  if (made == PeriodicOp::Made::kNonFinite) ++nonfinite;
  rounds_ns += now_ns() - start;
  waited_ns = gate->lane_waited_ns();
  traffic = core.ops[0]->traffic();
  return averaged;
}

void PeriodicLane::State::loop() {
  try {
    // The default stream would order the lane's transfers with training's kernels.
    const std::optional<c10::Stream> stream = side_stream(op->device());
    const c10::OptionalStreamGuard on_own_stream(stream);
    while (run_round()) {
      std::unique_lock lock(mutex);
      // A rank that wants to pause takes part in the others' rounds until they want to as well.
      options.clock->wait_for(lock, changed, options.interval,
                              [this] { return stopped || wants_to_pause; });
      if (stopped) break;
    }
  } catch (...) {
    fail(with_context(whoami() + ": ", std::current_exception()));
  }
  {
    std::lock_guard lock(mutex);
    running = wants_to_pause = false;
  }
  changed.notify_all();
}

PeriodicLane::PeriodicLane(std::shared_ptr<PeriodicOp> op, std::shared_ptr<WeightGate> gate,
                           LaneOptions lane, PeriodicLaneOptions options)
    : state_(std::make_shared<State>(std::move(op), std::move(gate), std::move(lane),
                                     std::move(options))) {
  state_->begin(LaneCore::News::kIgnored);
}

PeriodicLane::~PeriodicLane() { stop(); }

void PeriodicLane::resume() {
  check();
  if (state_->group.size == 1) return;
  {
    std::lock_guard lock(state_->mutex);
    BAGUA_CHECK(!state_->stopped, "module '", state_->core.name,
                "': asynchronous averaging has been stopped; wrap the module again.");
    state_->wants_to_pause = false;
    if (std::exchange(state_->running, true)) return;
  }
  state_->op->training_leaves();  // the thread does not run yet
  // Not under the caller's profiler, which may end before the rounds do.
  state_->threads[0]->post([shared = state_.pointer()] { shared->loop(); },
                           LaneThread::Inherit::kNothing);
}

void PeriodicLane::ask_to_pause() {
  state_.check(kOwned);
  leave();
  {
    std::lock_guard lock(state_->mutex);
    state_->wants_to_pause = state_->running;
  }
  state_->changed.notify_all();
}

bool PeriodicLane::pause(std::optional<std::chrono::milliseconds> limit) {
  ask_to_pause();
  bool known = false;
  {
    std::unique_lock lock(state_->mutex);
    const auto deadline =
        std::chrono::steady_clock::now() + limit.value_or(state_->options.timeout);
    const auto over = [&] { return !state_->running; };
    if (!state_->await(lock, deadline, over, "the others to end it")) {
      if (limit) return false;
      const int64_t rounds = state_->rounds;
      lock.unlock();
      throw_not_paused(rounds);
    }
    known = state_->failure_known;
  }
  state_->op->training_enters();  // the thread does not run any more
  if (!known) check();
  return true;
}

void PeriodicLane::throw_not_paused(int64_t rounds) {
  const LaneOptions& core = state_->core;
  const Group& group = state_->group;
  throw TimeoutError(
      concat("module '", core.name, "', rank ", group.rank, " of ", group.size,
             ": asynchronous averaging has not ended within ", state_->options.timeout.count(),
             " ms, because not every rank has asked for it: abort(model) must be called on all. ",
             core.board ? in_words(core.board->others({.number = rounds, .everyone = true})) : ""));
}

void PeriodicLane::enter() {
  state_.check(kOwned);
  RECORD_FUNCTION("bagua::WeightGate::enter", {});
  state_->gate->enter();
  state_->op->training_enters();
}

void PeriodicLane::leave() {
  if (!state_->gate->training_inside()) return;
  state_->op->training_leaves();
  state_->gate->leave();
}

bool PeriodicLane::inside() const { return state_->gate->training_inside(); }

bool PeriodicLane::at_gate() const { return state_->gate->lane_waits(); }

bool PeriodicLane::running() const {
  std::lock_guard lock(state_->mutex);
  return state_->running;
}

void PeriodicLane::check() {
  state_.check(kOwned);
  {
    std::lock_guard lock(state_->mutex);
    if (!state_->failure) return;
    state_->failure_known = true;
  }
  leave();
  const std::exception_ptr failure = state_->explained();
  std::rethrow_exception(with_message(
      failure,
      concat(message_of(failure),
             "\n  Weights are this rank's own. Every rank must call abort(model) before it "
             "ends; wrap the module again to go on.")));
}

void PeriodicLane::stop() noexcept {
  if (!state_.here()) return;
  const std::string reason = "module '" + state_->core.name + "' stopped averaging";
  const bool was_running = running();
  if (state_->stop(reason) && was_running) state_->abort_communicators(reason);
}

EngineStats PeriodicLane::stats() const {
  std::lock_guard lock(state_->mutex);
  BucketStats averages{};
  averages.name = "weights";
  averages.ops = {state_->op->describe()};
  averages.bytes = state_->op->bytes();
  averages.rounds = state_->averages;
  averages.traffic = state_->traffic;
  averages.busy_ns = state_->rounds_ns - state_->waited_ns;
  averages.waiting_ns = state_->waited_ns;
  averages.hidden_ns = averages.busy_ns;
  if (state_->op->device().is_cpu()) averages.nonfinite_rounds = state_->nonfinite;
  return {.buckets = {averages},
          .control = {},
          .rounds = state_->averages,
          .busy_ns = averages.busy_ns,
          .hidden_ns = averages.hidden_ns,
          .exposed_ns = state_->gate->training_waited_ns(),
          .longest_wait_ns = 0};
}

}  // namespace bagua
