#include "engine/engine.h"

#include <optional>
#include <unordered_set>
#include <utility>

#include <ATen/record_function.h>
#include <unistd.h>

#include "base/check.h"
#include "engine/engine_state.h"

namespace bagua {
namespace {

void check_lanes(const std::vector<Lane>& lanes, const EngineOptions& options) {
  BAGUA_CHECK_ARG(!lanes.empty(), "an engine needs a lane.");
  BAGUA_CHECK_ARG(options.control, "an engine needs a control communicator.");
  std::unordered_set<const void*> owned{options.control.get()};
  std::unordered_set<std::string> names;
  std::optional<at::Device> device;
  for (const Lane& lane : lanes) {
    for (const auto& communicator : lane.communicators) {
      BAGUA_CHECK_ARG(owned.insert(communicator.get()).second,
                      "a communicator belongs to one lane, or to the main thread; never both.");
    }
    for (const Bucket& bucket : lane.buckets) {
      bucket.check();
      if (!device) device = bucket.flat.device();
      BAGUA_CHECK_ARG(bucket.flat.device() == *device, "bucket '", bucket.name, "' is on ",
                      bucket.flat.device().str(), ", others are on ", device->str(),
                      "; all tensors of a wrapped module must be on one device.");
      for (const Slot& slot : bucket.slots) {
        BAGUA_CHECK_ARG(names.insert(slot.name).second, "slot '", slot.name, "' occurs twice.");
      }
    }
  }
}

}  // namespace

Engine::Engine(std::vector<Lane> lanes, EngineOptions options) : process_(getpid()) {
  check_lanes(lanes, options);
  const std::string name = options.name;
  const size_t count = lanes.size();
  state_ = std::make_shared<State>(std::move(lanes), std::move(options));
  if (state_->options.board) state_->options.board->beat_while_alive(state_);
  for (size_t i = 0; i < count; ++i) {
    threads_.push_back(std::make_unique<LaneThread>(concat("bagua-lane", i)));
  }
}

Engine::~Engine() {
  if (getpid() == process_) {
    stop();
    return;
  }
  // After fork the threads exist in the parent only: nothing may be joined, freed or closed here.
  new auto(std::move(threads_));
  new auto(std::move(state_));
}

void Engine::stop() noexcept {
  if (getpid() != process_) return;
  State& state = *state_;
  int64_t rounds = 0;
  bool failed = false;
  {
    std::lock_guard lock(state.mutex);
    if (std::exchange(state.stopped, true)) return;
    failed = state.failure != nullptr;
    // A round that this rank has not waited for is not done: others may wait for more of it, such
    // as which slots were used.
    rounds = state.open ? state.round - 1 : state.round;
  }
  state.changed.notify_all();
  // A rank that failed has said so already: leaving is its consequence, not the cause.
  if (state.options.board && !failed) state.options.board->leave(rounds);
  bool idle = true;
  for (const auto& thread : threads_) idle = thread->stop() && idle;
  if (idle) return state.leave_lanes();
  const std::string reason = "the engine of module '" + state.options.name + "' was stopped";
  state.options.control->abort(reason);
  for (const auto& lane : state.lanes) {
    for (const auto& communicator : lane.communicators) communicator->abort(reason);
  }
  state.leave_lanes();
}

void Engine::begin_round(const RoundOpening& opening) {
  State& state = *state_;
  std::unique_lock lock(state.mutex);
  if (state.failure) state.rethrow(lock);
  BAGUA_CHECK(!state.stopped, state.whoami(), ": the engine has been stopped; wrap again.");
  if (state.open && state.marked == 0) {
    state.grad_scale = opening.grad_scale;
    return;
  }
  if (state.open && state.marked < state.slot_states.size()) {
    const std::string reason =
        concat(state.whoami(), ": the round was left unfinished, ",
               state.slot_states.size() - state.marked, " of ", state.slot_states.size(),
               " tensors were never ready (an exception in backward, or a backward that reached "
               "only a part of the model). Wrap the model again with with_bagua on every rank.");
    lock.unlock();
    abort(reason);
    lock.lock();
    state.rethrow(lock);
  }
  if (state.open) {
    state.block(lock, [&] { return state.launched_done(); }, "the previous round");
    state.order_after_lanes();
  }
  const bool alone = state.options.control->group().size == 1;
  std::optional<WeightsDigest> weights;
  if (state.options.weights && opening.check_weights && !alone) {
    lock.unlock();
    weights = state.options.weights->take(state.round + 1);
    lock.lock();
  }
  state.open = true;
  state.round += 1;
  state.grad_scale = opening.grad_scale;
  state.marked = state.launched = state.done = 0;
  state.used_pending = state.used_done = 0;
  for (auto& slot : state.slot_states) slot.marked = false;
  for (auto& lane : state.lanes) lane.next = 0;
  for (size_t i = 0; i < state.buckets.size(); ++i) {
    state.progress[i].pending = static_cast<int32_t>(state.buckets[i].slots.size());
    state.progress[i].ready.clear();
  }
  if (alone) {
    state.agreed_round = state.round;
    return;
  }
  threads_[0]->post(
      [shared = state_, round = state.round, frozen = opening.frozen,
       weights = std::move(weights)] { shared->run_agreement(round, frozen, weights); });
}

void Engine::note_forward() {
  State& state = *state_;
  if (!state.options.weights || state.options.control->group().size == 1) return;
  int64_t next = 0;
  {
    const std::lock_guard lock(state.mutex);
    if (state.open || state.stopped || state.failure) return;
    next = state.round + 1;
  }
  state.options.weights->take_early(next);
}

void Engine::await_agreement() {
  State& state = *state_;
  std::unique_lock lock(state.mutex);
  state.block(
      lock, [&] { return state.agreed_round == state.round; }, "all ranks to start the round");
}

bool Engine::round_open() const {
  std::lock_guard lock(state_->mutex);
  return state_->open;
}

int64_t Engine::round() const {
  std::lock_guard lock(state_->mutex);
  return state_->round;
}

bool Engine::mark_ready(SlotId slot) {
  State& state = *state_;
  std::unique_lock lock(state.mutex);
  state.check_open(lock);
  if (state.slot_states.at(slot).marked) return false;
  mark(slot);
  return true;
}

void Engine::mark_all() {
  State& state = *state_;
  std::unique_lock lock(state.mutex);
  state.check_open(lock);
  for (size_t slot = 0; slot < state.slot_states.size(); ++slot) {
    if (!state.slot_states[slot].marked) mark(static_cast<SlotId>(slot));
  }
}

void Engine::mark(SlotId slot) {
  State& state = *state_;
  State::SlotState& entry = state.slot_states[slot];
  entry.marked = true;
  ++state.marked;
  State::Progress& bucket = state.progress[entry.bucket];
  bucket.ready.note_current_stream();
  if (--bucket.pending > 0) return;
  bucket.ready.record();
  bucket.ready_ns = now_ns();
  State::LaneState& lane = state.lanes[bucket.lane];
  while (lane.next < lane.buckets.size() && state.progress[lane.buckets[lane.next]].pending == 0) {
    const size_t index = lane.buckets[lane.next++];
    ++state.launched;
    threads_[bucket.lane]->post([shared = state_, index] { shared->run_bucket(index); });
  }
}

bool Engine::marked(SlotId slot) const {
  std::lock_guard lock(state_->mutex);
  return state_->slot_states.at(slot).marked;
}

void Engine::exchange_used(std::vector<uint8_t> used) {
  State& state = *state_;
  std::lock_guard lock(state.mutex);
  BAGUA_CHECK_ARG(used.size() == state.used.size(), "exchange_used takes one byte per slot.");
  state.used = std::move(used);
  ++state.used_pending;
  threads_[0]->post([shared = state_] { shared->run_exchange_used(); });
}

const std::vector<uint8_t>& Engine::used() const { return state_->used; }

void Engine::wait() {
  RECORD_FUNCTION("bagua::wait", {});
  State& state = *state_;
  std::unique_lock lock(state.mutex);
  if (state.failure) state.rethrow(lock);
  if (!state.open) return;
  state.block(lock, [&] { return state.launched_done(); }, "its buckets");
  state.order_after_lanes();
  if (state.marked == state.slot_states.size()) state.open = false;
}

void Engine::fail(const std::string& reason, bool timed_out) {
  State& state = *state_;
  std::unique_lock lock(state.mutex);
  const std::string message = concat(state.whoami(), ": ", reason);
  lock.unlock();
  state.fail(timed_out ? std::make_exception_ptr(TimeoutError(message))
                       : std::make_exception_ptr(TransportError(message)));
  lock.lock();
  state.rethrow(lock);
}

void Engine::abort(const std::string& reason) noexcept {
  state_->fail(std::make_exception_ptr(Error(reason)));
}

EngineStats Engine::stats() const {
  const State& state = *state_;
  std::lock_guard lock(state.mutex);
  EngineStats stats{.buckets = {},
                    .control = state.options.control->traffic(),
                    .rounds = state.round,
                    .busy_ns = state.clock.busy_ns(),
                    .hidden_ns = state.clock.hidden_ns(),
                    .exposed_ns = state.clock.exposed_ns(),
                    .longest_wait_ns = state.clock.longest_wait_ns()};
  for (const auto& entry : state.progress) stats.buckets.push_back(entry.stats);
  return stats;
}

const Bucket& Engine::bucket(size_t index) const { return state_->buckets.at(index); }
size_t Engine::buckets() const { return state_->buckets.size(); }
size_t Engine::slots() const { return state_->slot_states.size(); }

}  // namespace bagua
