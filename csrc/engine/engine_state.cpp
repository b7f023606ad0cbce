#include "engine/engine_state.h"

#include <algorithm>
#include <cstring>
#include <unordered_set>
#include <utility>

#include <ATen/ops/empty.h>
#include <ATen/record_function.h>

#include "base/check.h"
#include "engine/agreement.h"
#include "health/failure.h"
#include "health/straggler_watch.h"

namespace bagua {
namespace {

std::vector<std::vector<size_t>> slots_of(const std::vector<Lane>& lanes) {
  std::vector<std::vector<size_t>> counts;
  for (const Lane& lane : lanes) {
    counts.emplace_back();
    for (const Bucket& bucket : lane.buckets) counts.back().push_back(bucket.slots.size());
  }
  return counts;
}

std::vector<int32_t> parts_of(const std::vector<Lane>& lanes) {
  std::vector<int32_t> parts;
  for (const Lane& lane : lanes) {
    for (const Bucket& bucket : lane.buckets) parts.push_back(bucket.part);
  }
  return parts;
}

// Throws if the lanes cannot be run.
LaneCoreOptions core_options(const std::vector<Lane>& lanes, const EngineOptions& options) {
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
  return {.name = options.name,
          .group = options.control->group(),
          .board = options.board,
          .check_signals = options.check_signals,
          .control = options.control,
          .ops = std::move(all)};
}

}  // namespace

Engine::State::State(std::vector<Lane> lane_list, EngineOptions engine_options)
    : LaneCore(core_options(lane_list, engine_options)),
      options(std::move(engine_options)),
      round(slots_of(lane_list), parts_of(lane_list)) {
  for (Lane& lane : lane_list) {
    LaneState state;
    for (Bucket& bucket : lane.buckets) {
      Progress entry{.lane = lanes.size(),
                     .ready_ns = 0,
                     .ready = StreamPoints(bucket.flat.device()),
                     .stats = {}};
      if (!state.stream) state.stream = side_stream(bucket.flat.device());
      entry.stats.name = bucket.name;
      entry.stats.bytes = bucket.bytes();
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
  if (!round.open()) return {round.number(), false, text};
  for (const LaneState& lane : lanes) {
    if (lane.running) text += concat(", bucket '", buckets[*lane.running].name, "' is under way");
  }
  if (!round.agreed()) text += ", the ranks have not agreed on the round";
  return {round.number(), clock.caller_is_blocked(), text};
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

void Engine::State::run_agreement(int64_t for_round, const RoundOpening& opening,
                                  const std::optional<WeightsDigest>& weights) {
  try {
    RECORD_FUNCTION("bagua::agreement", {});
    const AgreementRecord mine{.fingerprint = options.fingerprint,
                               .round = static_cast<uint64_t>(for_round),
                               .incarnation = options.incarnation,
                               .flags = weights ? kShowsWeights : 0,
                               .part = opening.part ? static_cast<uint32_t>(*opening.part) + 1 : 0,
                               .frozen = opening.frozen,
                               .weights = weights ? combined(weights->parts) : 0,
                               .weights_before = weights ? combined(weights->before()) : 0};
    if (!agree(*options.control, mine)) {
      options.weights->name_difference(*options.control, *weights);
    }
    std::lock_guard lock(mutex);
    round.agree(for_round);
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
  std::optional<BucketAccount> account;
  {
    std::unique_lock lock(mutex);
    changed.wait(lock, [&] { return failure || stopped || round.agreed(); });
    if (failure || stopped) return;
    this_round = round.number();
    scale = grad_scale;
    account.emplace(lanes[entry.lane].communicators, clock);
    lanes[entry.lane].running = index;
  }
  try {
    const std::optional<c10::Stream>& stream = lanes[entry.lane].stream;
    const c10::OptionalStreamGuard on_lane_stream(stream);
    run_ops({.flat = bucket.flat,
             .ops = bucket.ops,
             .communicators = lanes[entry.lane].communicators,
             .round = {.number = this_round, .grad_scale = scale, .bucket = bucket.name}},
            [&] {
              if (stream) entry.ready.block(*stream);
              // A codec that met a NaN left it in the padding, where nothing would overwrite it.
              if (at::Tensor padding = bucket.padding(); padding.numel() > 0) padding.zero_();
            });
  } catch (...) {
    return fail(with_context(whoami() + ", ", std::current_exception()));
  }
  {
    std::lock_guard lock(mutex);
    account->close(clock, entry.ready_ns, entry.stats);
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
    if (core.group.size > 1) options.control->all_reduce(mask, ReduceOp::kMax);
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
  {
    const CallerBlocked blocked(clock);
    const auto look = [&] { stragglers.look(me, my_round); };
    if (!await(lock, deadline, over, what, look)) time_out(lock, what);
  }
  if (stragglers.reported() && !failure && !stopped) {
    lock.unlock();
    stragglers.over(me);
    lock.lock();
  }
  if (failure) rethrow(lock);
  BAGUA_CHECK(!stopped, me, ": the engine was stopped while waiting for ", what, ".");
}

}  // namespace bagua
