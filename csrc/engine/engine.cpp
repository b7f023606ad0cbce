#include "engine/engine.h"

#include <optional>
#include <string>
#include <utility>

#include <ATen/record_function.h>

#include "base/check.h"
#include "engine/engine_state.h"
#include "health/failure.h"

namespace bagua {
namespace {

constexpr const char* kOwned = "the communication of a wrapped module";

}  // namespace

Engine::Engine(std::vector<Lane> lanes, EngineOptions options)
    : state_(std::make_shared<State>(std::move(lanes), std::move(options))) {
  state_->begin(LaneCore::News::kEndWaits);
}

Engine::~Engine() { stop(); }

void Engine::stop() noexcept {
  if (!state_.here()) return;
  if (state_->stop("the engine of module '" + state_->core.name + "' was stopped")) {
    state_->leave_lanes();
  }
}

void Engine::begin_round(const RoundOpening& opening) {
  check_process();
  State& state = *state_;
  std::unique_lock lock(state.mutex);
  if (state.failure) state.rethrow(lock);
  BAGUA_CHECK(!state.stopped, state.whoami(), ": the engine has been stopped; wrap again.");
  state.check_device(lock);
  if (state.round.open() && state.round.untouched()) {
    state.grad_scale = opening.grad_scale;
    return;
  }
  if (state.round.open() && !state.round.complete()) {
    const std::string reason =
        concat(state.whoami(), ": the round was left unfinished, ", state.round.unmarked(), " of ",
               state.round.slots(),
               " tensors were never ready (an exception in backward, or a backward that reached "
               "only a part of the model). Wrap the model again with with_bagua on every rank.");
    state.fail_and_throw(lock, std::make_exception_ptr(Error(reason)));
  }
  if (state.round.open()) {
    state.block(lock, [&] { return state.round.launched_done(); }, "the previous round");
    state.order_after_lanes();
  }
  const bool alone = state.core.group.size == 1;
  std::optional<WeightsDigest> weights;
  if (state.options.weights && opening.check_weights && !alone) {
    lock.unlock();
    weights = state.options.weights->take(state.round.number() + 1);
    lock.lock();
  }
  state.round.begin(alone, opening.part);
  state.grad_scale = opening.grad_scale;
  state.error.clear();
  for (State::Progress& bucket : state.progress) bucket.ready.clear();
  if (alone) return;
  state.threads[0]->post(
      [shared = state_.pointer(), round = state.round.number(), opening,
       weights = std::move(weights)] { shared->run_agreement(round, opening, weights); });
}

void Engine::check_process() const { state_.check(kOwned); }

void Engine::note_forward() {
  if (!state_.here()) return;  // a child may evaluate
  State& state = *state_;
  if (!state.options.weights || state.core.group.size == 1) return;
  int64_t next = 0;
  {
    const std::lock_guard lock(state.mutex);
    if (state.round.open() || state.stopped || state.failure) return;
    next = state.round.number() + 1;
  }
  state.options.weights->take_early(next);
}

void Engine::await_agreement() {
  check_process();
  State& state = *state_;
  std::unique_lock lock(state.mutex);
  state.block(lock, [&] { return state.round.agreed(); }, "all ranks to start the round");
}

bool Engine::round_open() const {
  std::lock_guard lock(state_->mutex);
  return state_->round.open();
}

int64_t Engine::round() const {
  std::lock_guard lock(state_->mutex);
  return state_->round.number();
}

bool Engine::mark_ready(SlotId slot) {
  check_process();
  State& state = *state_;
  std::unique_lock lock(state.mutex);
  state.check_open(lock);
  if (state.round.marked(slot)) return false;
  mark(slot);
  return true;
}

void Engine::mark_all() {
  check_process();
  State& state = *state_;
  std::unique_lock lock(state.mutex);
  state.check_open(lock);
  for (size_t slot = 0; slot < state.round.slots(); ++slot) {
    if (!state.round.marked(slot)) mark(slot);
  }
}

void Engine::mark(size_t slot) {
  State& state = *state_;
  const size_t index = state.round.bucket_of(slot);
  State::Progress& bucket = state.progress[index];
  bucket.ready.note_current_stream();
  if (!state.round.mark(slot)) return;
  bucket.ready.record();
  bucket.ready_ns = now_ns();
  const RoundState::Launch launch = state.round.launch_from(index);
  for (size_t next = launch.first; next < launch.first + launch.count; ++next) {
    if (!state.round.takes_part(next)) continue;
    state.threads[launch.lane]->post(
        [shared = state_.pointer(), next] { shared->run_bucket(next); });
  }
}

bool Engine::marked(SlotId slot) const {
  std::lock_guard lock(state_->mutex);
  return state_->round.marked(slot);
}

void Engine::exchange_used(std::vector<uint8_t> used) {
  check_process();
  State& state = *state_;
  std::lock_guard lock(state.mutex);
  BAGUA_CHECK_ARG(used.size() == state.used.size(), "exchange_used takes one byte per slot.");
  state.used = std::move(used);
  state.round.exchange_begins();
  state.threads[0]->post([shared = state_.pointer()] { shared->run_exchange_used(); });
}

const std::vector<uint8_t>& Engine::used() const { return state_->used; }

void Engine::wait() {
  check_process();
  RECORD_FUNCTION("bagua::wait", {});
  State& state = *state_;
  std::unique_lock lock(state.mutex);
  if (state.failure) state.rethrow(lock);
  if (!state.round.open()) return;
  state.block(lock, [&] { return state.round.launched_done(); }, "its buckets");
  state.order_after_lanes();
  state.check_device(lock);
  state.round.end();
}

void Engine::settle() {
  State& state = *state_;
  {
    const std::lock_guard lock(state.mutex);
    if (state.failure || state.stopped) return;  // thrown, or nothing that could fail
  }
  for (const State::LaneState& lane : state.lanes) {
    if (!lane.stream) continue;
    StreamPoints given(lane.stream->device());
    const c10::StreamGuard on_lane_stream(*lane.stream);
    given.mark_current_stream();
    given.synchronize();
  }
  std::unique_lock lock(state.mutex);
  state.check_device(lock);
}

void Engine::fail(const std::string& reason, bool timed_out) {
  check_process();
  State& state = *state_;
  std::unique_lock lock(state.mutex);
  const std::string message = concat(state.whoami(), ": ", reason);
  state.fail_and_throw(lock, timed_out ? std::make_exception_ptr(TimeoutError(message))
                                       : std::make_exception_ptr(TransportError(message)));
}

void Engine::note_error(const std::exception_ptr& error) noexcept {
  if (!state_.here()) return;
  const std::lock_guard lock(state_->mutex);
  if (state_->round.open()) state_->error = message_of(error);
}

void Engine::abort(const std::string& reason) noexcept {
  if (!state_.here()) return;
  state_->fail(std::make_exception_ptr(Error(reason)));
}

EngineStats Engine::stats() const {
  const State& state = *state_;
  std::lock_guard lock(state.mutex);
  EngineStats stats{.buckets = {},
                    .control = state.options.control->traffic(),
                    .rounds = state.round.number(),
                    .busy_ns = state.clock.busy_ns(),
                    .hidden_ns = state.clock.hidden_ns(),
                    .exposed_ns = state.clock.exposed_ns(),
                    .longest_wait_ns = state.clock.longest_wait_ns()};
  for (const auto& entry : state.progress) stats.buckets.push_back(entry.stats);
  return stats;
}

const Bucket& Engine::bucket(size_t index) const { return state_->buckets.at(index); }
size_t Engine::buckets() const { return state_->buckets.size(); }
size_t Engine::slots() const { return state_->round.slots(); }

}  // namespace bagua
