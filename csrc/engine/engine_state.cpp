#include "engine/engine_state.h"

#include <algorithm>
#include <cstring>
#include <utility>

#include <ATen/ops/empty.h>
#include <ATen/record_function.h>

#include "base/check.h"
#include "comm/abort_all.h"
#include "engine/agreement.h"
#include "health/diagnose.h"
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

}  // namespace

Engine::State::State(std::vector<Lane> lane_list, EngineOptions engine_options)
    : options(std::move(engine_options)), round(slots_of(lane_list), parts_of(lane_list)) {
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

std::string Engine::State::whoami() const {
  const Group group = options.control->group();
  return concat("module '", options.name, "', rank ", group.rank, " of ", group.size, ", round ",
                round.number());
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

void Engine::State::check_communicators(std::unique_lock<std::mutex>& lock) {
  const auto on_device = [](const LaneState& lane) { return lane.stream.has_value(); };
  if (std::none_of(lanes.begin(), lanes.end(), on_device)) return;  // lanes have caught it
  const std::string me = whoami();
  lock.unlock();
  try {
    for (const LaneState& lane : lanes) {
      for (const auto& communicator : lane.communicators) communicator->check();
    }
  } catch (...) {
    fail(with_context(me + ", after its buckets were put on the device: ",
                      std::current_exception()));
  }
  lock.lock();
  if (failure) rethrow(lock);
}

void Engine::State::fail(const std::exception_ptr& cause) noexcept {
  end_with(cause, {message_of(cause), blame_of(cause)});
}

void Engine::State::end_with(const std::exception_ptr& cause,
                             const FailureBoard::News& news) noexcept {
  {
    std::lock_guard lock(mutex);
    if (failure) return;
    failure = cause;
    failed_alike = news.blame == Blame::kAllRanks;
  }
  changed.notify_all();
  if (options.board) options.board->publish(news.text, news.blame);
  abort_communicators(news.text);
}

void Engine::State::abort_communicators(const std::string& reason) const noexcept {
  std::vector<std::shared_ptr<Communicator>> all{options.control};
  for (const LaneState& lane : lanes) {
    all.insert(all.end(), lane.communicators.begin(), lane.communicators.end());
  }
  abort_all(all, reason);
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
  } catch (const MismatchError& error) {
    const FailureBoard::News news{error.what(), Blame::kAllRanks};
    end_with(error_of(news, whoami()), news);
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
  const BucketOp* running = nullptr;
  try {
    const std::optional<c10::Stream>& stream = lanes[entry.lane].stream;
    const c10::OptionalStreamGuard on_lane_stream(stream);
    if (stream) entry.ready.block(*stream);
    // A codec that met a NaN left it in the padding too, where nothing would ever overwrite it.
    if (at::Tensor padding = bucket.padding(); padding.numel() > 0) padding.zero_();
    const Round context{.number = this_round, .grad_scale = scale, .bucket = bucket.name};
    for (const auto& op : bucket.ops) {
      running = op.get();
      RECORD_FUNCTION("bagua::" + bucket.name + "::" + op->describe(), {});
      op->run(bucket.flat, context);
    }
    for (const auto& communicator : lanes[entry.lane].communicators) {
      communicator->invalidate_if_aborted(bucket.flat);
    }
  } catch (...) {
    fail(
        with_context(concat(whoami(), ", bucket '", bucket.name, "' (", bucket.bytes(), " bytes), ",
                            running ? running->describe() : "before its first op", ": "),
                     std::current_exception()));
    return;
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
    if (options.control->group().size > 1) options.control->all_reduce(mask, ReduceOp::kMax);
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

void Engine::State::block(std::unique_lock<std::mutex>& lock, const std::function<bool()>& done_now,
                          const char* what) {
  using std::chrono::steady_clock;
  const auto deadline = steady_clock::now() + options.timeout;
  auto next_poll = steady_clock::now() + kBetweenNews;
  StragglerWatch stragglers(options.stragglers, options.board, options.timeout, what);
  clock.caller_blocks(now_ns());
  while (!failure && !stopped && !done_now()) {
    const auto slice = std::min({deadline, next_poll, steady_clock::now() + kBetweenSignals});
    if (changed.wait_until(lock, slice, [&] { return failure || stopped || done_now(); })) break;
    look_for_signals(lock, what);
    const bool late = steady_clock::now() >= deadline;
    if (!late && steady_clock::now() < next_poll) continue;
    next_poll = steady_clock::now() + kBetweenNews;
    const int64_t my_round = round.number();
    const std::string me = whoami(), buckets_left = outstanding();
    lock.unlock();
    std::optional<FailureBoard::News> news;
    if (options.board) news = options.board->news(my_round);
    if (news) {
      end_with(error_of(*news, me), *news);
    } else if (late) {
      fail(std::make_exception_ptr(TimeoutError(
          concat(me, ": no result within ", options.timeout.count(), " ms while waiting for ", what,
                 "; buckets outstanding: ", buckets_left,
                 ". Another rank is slower, stopped, or makes fewer synchronising steps; raise "
                 "timeout= of init_process_group if it is merely slow."))));
    } else {
      stragglers.look(me, my_round);
    }
    lock.lock();
  }
  clock.caller_goes_on(now_ns());
  if (stragglers.reported() && !failure && !stopped) {
    const std::string me = whoami();
    lock.unlock();
    stragglers.over(me);
    lock.lock();
  }
  if (failure) rethrow(lock);
  BAGUA_CHECK(!stopped, whoami(), ": the engine was stopped while waiting for ", what, ".");
}

void Engine::State::look_for_signals(std::unique_lock<std::mutex>& lock, const char* what) {
  if (!options.check_signals) return;
  const std::string me = whoami();
  lock.unlock();
  try {
    options.check_signals();
  } catch (...) {
    fail(std::make_exception_ptr(Error(concat(me, ": rank ", options.control->group().rank,
                                              " was interrupted while it waited for ", what))));
    lock.lock();
    clock.caller_goes_on(now_ns());
    throw;
  }
  lock.lock();
}

void Engine::State::rethrow(std::unique_lock<std::mutex>& lock) {
  const std::exception_ptr cause = failure;
  const int64_t my_round = round.number();
  const bool alike = failed_alike;
  std::exception_ptr explained = diagnosed;
  lock.unlock();
  if (!options.board || alike) std::rethrow_exception(cause);
  if (!explained) {
    explained = diagnose(cause, {.number = my_round}, *options.board);
    const std::lock_guard relock(mutex);
    diagnosed = explained;
  }
  std::rethrow_exception(explained);
}

}  // namespace bagua
