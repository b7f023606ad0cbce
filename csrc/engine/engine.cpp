#include "engine/engine.h"

#include <algorithm>
#include <cstring>
#include <functional>
#include <mutex>
#include <optional>
#include <string>
#include <unordered_set>
#include <utility>
#include <vector>

#include <ATen/ops/empty.h>
#include <ATen/record_function.h>
#include <unistd.h>

#include "base/check.h"
#include "comm/device_stream.h"
#include "engine/agreement.h"
#include "engine/lane.h"
#include "engine/round_state.h"
#include "engine/weights_sample.h"
#include "health/failure.h"
#include "health/straggler_watch.h"

namespace bagua {
namespace {

constexpr const char* kOwned = "the communication of a wrapped module";

std::vector<std::vector<RoundState::Shape>> shapes_of(const std::vector<Lane>& lanes) {
  std::vector<std::vector<RoundState::Shape>> shapes;
  for (const Lane& lane : lanes) {
    shapes.emplace_back();
    for (const Bucket& bucket : lane.buckets) {
      shapes.back().push_back({.slots = bucket.slots.size(), .part = bucket.part});
    }
  }
  return shapes;
}

uint16_t flags_of(const RoundOpening& opening, bool shows_weights) {
  return static_cast<uint16_t>((shows_weights ? kShowsWeights : 0) |
                               (opening.samples.said ? kSaysSamples : 0) |
                               (opening.samples_later ? kSamplesLater : 0));
}

// The options of the core that runs all lanes. Throws if they cannot be run.
LaneOptions options_of(const std::vector<Lane>& lanes, const EngineOptions& options) {
  BAGUA_CHECK_ARG(!lanes.empty(), "an engine needs a lane.");
  BAGUA_CHECK_ARG(options.control, "an engine needs a control communicator.");
  CountingCommunicators all;
  std::unordered_set<const void*> owned{options.control.get()};
  std::unordered_set<std::string> names;
  std::optional<at::Device> device;
  for (const Lane& lane : lanes) {
    for (const auto& communicator : lane.communicators) {
      BAGUA_CHECK_ARG(owned.insert(communicator.get()).second,
                      "a communicator belongs to one lane, or to the main thread; never both.");
      all.push_back(communicator);
    }
    for (const Bucket& bucket : lane.buckets) {
      if (!device) device = bucket.flat.device();
      BAGUA_CHECK_ARG(bucket.flat.device() == *device, "bucket '", bucket.name, "' is on ",
                      bucket.flat.device().str(), ", others are on ", device->str(),
                      "; all tensors of a wrapped module must be on one device.");
      for (const Slot& slot : bucket.slots) {
        BAGUA_CHECK_ARG(names.insert(slot.name).second, "slot '", slot.name, "' occurs twice.");
      }
    }
  }
  return {.name = options.name,
          .control = options.control,
          .ops = std::move(all),
          .board = options.board,
          .check_signals = options.check_signals};
}

}  // namespace

// Rounds over buckets that are fixed up front: which of them run, and what callers wait for.
struct Engine::State final : LaneCore {
  struct Progress {
    size_t lane;
    int64_t ready_ns;
    StreamPoints ready;  // the work that fills its slots
    BucketStats stats;
    int64_t done_in = 0;  // the last round that it was done in
  };
  struct LaneState {
    std::optional<size_t> running;
    CountingCommunicators communicators;
    std::optional<c10::Stream> stream;  // of its ops; none on CPU
  };

  State(std::vector<Lane> lanes, EngineOptions engine_options);

  // Lane side.
  void post_agreement(const RoundOpening& opening, std::optional<WeightsDigest> weights = {});
  void run_agreement(int64_t for_round, const RoundOpening& opening,
                     const std::optional<WeightsDigest>& weights);
  void run_bucket(size_t index);
  void run_exchange_used();

  // Caller's side: work enqueued on the caller's current stream from now on follows what the
  // lanes' streams have been given; see Note [Streams].
  void order_after_lanes() const;
  void leave_lanes() const noexcept;  // the order at shutdown, when the device may be gone already

  // Throws a failure of work that the lanes have put on a device.
  void check_device(std::unique_lock<std::mutex>& lock);

  // Blocks until `done` holds under the lock; see Engine::wait for what it throws.
  void block(std::unique_lock<std::mutex>& lock, const std::function<bool()>& done,
             const char* what);
  // The open round begins again: whether its ranks are to agree again. Note [Late samples]
  bool take_late_samples(const RoundOpening& opening);
  // Throws the stored failure, or if no round is open.
  void check_open(std::unique_lock<std::mutex>& lock);
  std::string outstanding() const;
  // The end of a wait that took too long, which another rank may have caused.
  void time_out(std::unique_lock<std::mutex>& lock, const char* what);

  Whereabouts whereabouts() const override;
  std::string place() const override { return concat("round ", round.number()); }
  Position position() const override { return {.number = round.number()}; }
  int64_t rounds_done() const override;
  std::string error_of_caller() const override;

  EngineOptions options;
  std::vector<Bucket> buckets;
  std::vector<LaneState> lanes;

  std::vector<Progress> progress;
  std::string error;  // what autograd has thrown in the open round
  RoundState round;
  int64_t caller = 0;  // the thread that began the last round
  float grad_scale = 1.0f;
  RoundOpening opened;        // as this rank has opened the round
  Weighing weighing;          // once the ranks have agreed
  bool weighing_due = false;  // it is of numbers that some ranks have not known
  std::vector<uint8_t> used;
};

Engine::State::State(std::vector<Lane> lane_list, EngineOptions engine_options)
    : LaneCore(options_of(lane_list, engine_options)),
      options(std::move(engine_options)),
      round(shapes_of(lane_list)) {
  for (Lane& lane : lane_list) {
    LaneState state;
    for (Bucket& bucket : lane.buckets) {
      Progress entry{.lane = lanes.size(),
                     .ready_ns = 0,
                     .ready = StreamPoints(bucket.flat.device()),
                     .stats = {}};
      if (!state.stream) state.stream = side_stream(bucket.flat.device());
      entry.stats.name = bucket.name;
      entry.stats.bytes = static_cast<int64_t>(bucket.flat.nbytes());
      if (bucket.flat.is_cpu()) entry.stats.nonfinite_rounds = 0;
      for (const auto& op : bucket.ops) entry.stats.ops.push_back(op->describe());
      progress.push_back(std::move(entry));
      buckets.push_back(std::move(bucket));
    }
    state.communicators = std::move(lane.communicators);
    threads.push_back(std::make_unique<LaneThread>(concat("bagua-lane", lanes.size())));
    lanes.push_back(std::move(state));
  }
  used.assign(round.slots(), 0);
}

// A round that this rank has not waited for is not done: others may wait for more of it, such as
// which slots were used.
int64_t Engine::State::rounds_done() const { return round.number() - (round.open() ? 1 : 0); }

std::string Engine::State::error_of_caller() const {
  return round.open() && !error.empty() ? concat(whoami(), ": ", error) : "";
}

Whereabouts Engine::State::whereabouts() const {
  const std::lock_guard lock(mutex);
  std::string text = round.text();
  if (!round.open()) return {round.number(), false, text, 0, caller};
  for (const LaneState& lane : lanes) {
    if (lane.running) text += concat(", bucket '", buckets[*lane.running].name, "' is under way");
  }
  if (!round.agreed()) text += ", the ranks have not agreed on the round";
  const bool waits = clock.caller_is_blocked();
  return {round.number(), waits, text, waits ? caller : 0, caller};
}

void Engine::State::order_after_lanes() const {
  for (const LaneState& lane : lanes) {
    if (lane.stream) current_stream_waits_for(*lane.stream);
  }
}

void Engine::State::leave_lanes() const noexcept {
  try {
    order_after_lanes();
  } catch (const std::exception&) {  // at exit, or after a failure of the device: nothing to order
    return;
  }
}

void Engine::State::check_device(std::unique_lock<std::mutex>& lock) {
  const auto on_device = [](const LaneState& lane) { return lane.stream.has_value(); };
  if (std::none_of(lanes.begin(), lanes.end(), on_device)) return;  // lanes have caught it
  lock.unlock();
  check_communicators();
  lock.lock();
  if (failure) rethrow(lock);
}

void Engine::State::post_agreement(const RoundOpening& opening,
                                   std::optional<WeightsDigest> weights) {
  opened = opening;
  threads[0]->post([this, self = shared_from_this(), number = round.number(), opening,
                    shown = std::move(weights)] { run_agreement(number, opening, shown); });
}

bool Engine::State::take_late_samples(const RoundOpening& opening) {
  if (opening.samples_later || group.size == 1) return false;
  const bool late = std::exchange(opened.samples_later, false);
  if (late && weighing_due) return true;
  BAGUA_CHECK(!late || !opening.samples.said, whoami(),
              ": bagua_samples() was called for the first time after buffers had been given to all "
              "ranks, in an evaluation or in no_sync(). Call bagua_samples(0) once after the wrap, "
              "on every rank.");
  BAGUA_CHECK(late || !opening.samples.said || opening.samples == opened.samples, whoami(),
              ": bagua_samples() says ", opening.samples.number,
              " for a round that its first "
              "forward has opened with ",
              opened.samples.number, opened.samples.said ? "" : " (none said)",
              ". Call it before the first forward of a step, with the number of the whole step; "
              "numbers inside no_sync() add up.");
  return false;
}

void Engine::State::run_agreement(int64_t for_round, const RoundOpening& opening,
                                  const std::optional<WeightsDigest>& weights) {
  try {
    RECORD_FUNCTION("bagua::agreement", {});
    const AgreementRecord mine{.fingerprint = options.fingerprint,
                               .round = static_cast<uint64_t>(for_round),
                               .incarnation = options.incarnation,
                               .flags = flags_of(opening, weights.has_value()),
                               .part = static_cast<uint16_t>(opening.part ? *opening.part + 1 : 0),
                               .samples = opening.has_inputs ? opening.samples.number : 0.0f,
                               .frozen = opening.frozen,
                               .weights = weights ? combined(weights->parts) : 0,
                               .weights_before = weights ? combined(weights->before()) : 0};
    const Agreement found = agree(*options.control, mine);
    if (!found.equal_weights) options.weights->name_difference(*options.control, *weights);
    {
      const std::lock_guard lock(mutex);
      weighing = found.weighing;
      weighing_due = found.samples_later;
      round.agree(for_round);
    }
    changed.notify_all();
    if (found.samples_later && !opening.samples_later) run_agreement(for_round, opening, {});
  } catch (const MismatchError& difference) {
    end_with(difference);
  } catch (...) {
    fail(with_context(whoami() + ": ", std::current_exception()));
  }
  changed.notify_all();
}

void Engine::State::run_bucket(size_t index) {
  Bucket& bucket = buckets[index];
  Progress& entry = progress[index];
  int64_t this_round = 0;
  float scale = 1.0f;
  double factor = 1.0;
  std::optional<BucketAccount> account;
  std::optional<bool> finite;
  {
    std::unique_lock lock(mutex);
    changed.wait(lock, [&] { return failure || stopped || (round.agreed() && !weighing_due); });
    if (failure || stopped) return;
    this_round = round.number();
    scale = grad_scale;
    factor = weighing.factor(opened.samples);
    account.emplace(lanes[entry.lane].communicators, clock);
    lanes[entry.lane].running = index;
  }
  try {
    const std::optional<c10::Stream>& stream = lanes[entry.lane].stream;
    const c10::OptionalStreamGuard on_lane_stream(stream);
    finite = run_ops({.flat = bucket.flat,
                      .ops = bucket.ops,
                      .communicators = lanes[entry.lane].communicators,
                      .round = {.number = this_round, .grad_scale = scale, .bucket = bucket.name}},
                     [&] {
                       if (stream) entry.ready.block(*stream);
                       // A codec that met a NaN left it in the padding, where nothing would
                       // overwrite it.
                       if (at::Tensor padding = bucket.padding(); padding.numel() > 0) {
                         padding.zero_();
                       }
                       weigh(bucket, factor);
                     });
  } catch (...) {
    return fail(with_context(whoami() + ", ", std::current_exception()));
  }
  {
    std::lock_guard lock(mutex);
    account->close(clock, entry.ready_ns, finite, entry.stats);
    entry.done_in = this_round;
    lanes[entry.lane].running.reset();
    round.bucket_done();
  }
  changed.notify_all();
}

void Engine::State::run_exchange_used() {
  try {
    std::unique_lock lock(mutex);
    changed.wait(lock, [&] { return failure || stopped || round.agreed(); });
    if (failure || stopped) return;
    at::Tensor mask = at::empty({static_cast<int64_t>(used.size())}, at::kByte);
    std::memcpy(mask.data_ptr(), used.data(), used.size());
    lock.unlock();
    if (group.size > 1) options.control->all_reduce(mask, ReduceOp::kMax);
    lock.lock();
    std::memcpy(used.data(), mask.data_ptr(), used.size());
    round.exchange_done();
  } catch (...) {
    fail(with_context(whoami() + ", exchange of used parameters: ", std::current_exception()));
  }
  changed.notify_all();
}

void Engine::State::check_open(std::unique_lock<std::mutex>& lock) {
  if (failure) rethrow(lock);
  BAGUA_CHECK(round.open(), whoami(), ": no round is open; run a forward in training mode first.");
}

std::string Engine::State::outstanding() const {
  std::string names;
  for (size_t i = 0; i < progress.size(); ++i) {
    if (round.launched(i) && progress[i].done_in < round.number()) {
      names += concat(names.empty() ? "" : ", ", "'", progress[i].stats.name, "'");
    }
  }
  return names.empty() ? "none" : names;
}

void Engine::State::time_out(std::unique_lock<std::mutex>& lock, const char* what) {
  const int64_t my_round = round.number();
  const std::string me = whoami(), buckets_left = outstanding();
  lock.unlock();
  if (const auto news = options.board ? options.board->news(my_round) : std::nullopt) {
    end_with(error_of(*news, me), *news);
  } else {
    fail(std::make_exception_ptr(TimeoutError(
        concat(me, ": no result within ", options.timeout.count(), " ms while waiting for ", what,
               "; buckets outstanding: ", buckets_left,
               ". Another rank is slower, stopped, or makes fewer synchronising steps; raise "
               "timeout= of init_process_group if it is merely slow."))));
  }
  lock.lock();
}

void Engine::State::block(std::unique_lock<std::mutex>& lock, const std::function<bool()>& done_now,
                          const char* what) {
  const std::string me = whoami();
  const int64_t my_round = round.number();
  const auto over = [&] { return failure || stopped || done_now(); };
  const auto deadline = std::chrono::steady_clock::now() + options.timeout;
  StragglerWatch stragglers(options.stragglers, options.board, options.timeout, what);
  const auto look = [&] { stragglers.look(me, my_round); };
  if (!await(lock, deadline, over, what, look)) time_out(lock, what);
  if (stragglers.reported() && !failure && !stopped) {
    lock.unlock();
    stragglers.over(me);
    lock.lock();
  }
  if (failure) rethrow(lock);
  BAGUA_CHECK(!stopped, me, ": the engine was stopped while waiting for ", what, ".");
}

Engine::Engine(std::vector<Lane> lanes, EngineOptions options)
    : state_(std::make_shared<State>(std::move(lanes), std::move(options))) {
  state_->begin(LaneCore::News::kEndWaits);
}

Engine::~Engine() { stop(); }

void Engine::stop(bool agreed) noexcept {
  if (!state_.here()) return;
  if (state_->stop("the engine of module '" + state_->core.name + "' was stopped", agreed)) {
    state_->leave_lanes();
  }
}

void Engine::begin_round(const RoundOpening& opening) {
  check_process();
  State& state = *state_;
  refuse_capture(state.buckets.front().flat.device());
  std::unique_lock lock(state.mutex);
  if (state.failure) state.rethrow(lock);
  BAGUA_CHECK(!state.stopped, state.whoami(), ": the engine has been stopped; wrap again.");
  state.check_device(lock);
  if (state.round.open() && state.round.untouched()) {
    state.grad_scale = opening.grad_scale;
    if (state.take_late_samples(opening)) state.post_agreement(opening);
    return;
  }
  if (state.round.open() && !state.round.complete()) {
    const std::string reason =
        concat(state.whoami(), ": the round was left unfinished, ", state.round.unmarked(), " of ",
               state.round.slots(),
               " tensors were never ready (an exception in backward, or a backward that reached "
               "only a part of the model). Wrap the model again with bagua.wrap on every rank.");
    state.fail_and_throw(lock, std::make_exception_ptr(Error(reason)));
  }
  if (state.round.open()) {
    state.block(lock, [&] { return state.round.launched_done(); }, "the previous round");
    state.order_after_lanes();
  }
  const bool alone = state.group.size == 1;
  std::optional<WeightsDigest> weights;
  if (state.options.weights && opening.has_inputs && !alone) {
    lock.unlock();
    weights = state.options.weights->take(state.round.number() + 1);
    lock.lock();
  }
  state.round.begin(alone, opening.part);
  state.caller = gettid();
  state.grad_scale = opening.grad_scale;
  state.error.clear();
  for (State::Progress& bucket : state.progress) bucket.ready.clear();
  state.weighing = {};
  state.weighing_due = false;
  if (!alone) state.post_agreement(opening, std::move(weights));
}

void Engine::check_process() const { state_.check(kOwned); }

void Engine::note_forward() {
  if (!state_.here()) return;  // a child may evaluate
  State& state = *state_;
  if (!state.options.weights || state.group.size == 1) return;
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

bool Engine::by_samples() const {
  const std::lock_guard lock(state_->mutex);
  return state_->weighing.by_samples;
}

double Engine::weight() const {
  const std::lock_guard lock(state_->mutex);
  return state_->weighing.factor(state_->opened.samples);
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
  for (const size_t next : state.round.launch_from(index)) {
    state.threads[bucket.lane]->post(
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
    const c10::StreamGuard on_lane_stream(*lane.stream);
    wait_for_current_stream(lane.stream->device());
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
