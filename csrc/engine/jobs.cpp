#include "engine/jobs.h"

#include <algorithm>
#include <atomic>
#include <condition_variable>
#include <deque>
#include <mutex>
#include <optional>
#include <utility>

#include <ATen/ScalarOps.h>
#include <ATen/record_function.h>

#include "base/check.h"
#include "comm/abort_all.h"
#include "comm/device_stream.h"
#include "comm/tensor_checks.h"
#include "engine/job_agreement.h"
#include "engine/lane_thread.h"
#include "health/diagnose.h"
#include "health/failure.h"

namespace bagua {
namespace {

struct Pending {
  Job job;
  std::string text;  // describes the job to the other ranks
  uint64_t hash;     // of the text
  DynamicLane::Future future;
  StreamPoints ready;  // the work that fills the tensor
  int64_t posted_ns;
};

// Decides how a failure is explained.
enum class FailurePoint : uint8_t {
  kInRound,        // in the round under way
  kBetweenRounds,  // maybe after the last job of a round, before the first one of the next
};

void check_job(const Job& job) {
  BAGUA_CHECK_ARG(job.plan && job.flat.defined() && job.flat.layout() == at::kStrided &&
                      job.flat.dim() == 1 && job.flat.is_contiguous(),
                  "job '", job.plan ? job.plan->name : "",
                  "': the memory must be a contiguous tensor of one dimension.");
}

std::vector<c10::Device> devices_of(const at::Tensor& tensor) {
  if (tensor.is_cpu()) return {};
  return {tensor.device()};
}

}  // namespace

// Lives as long as the lane or its thread, which may be blocked in a transport. One mutex; it is
// never held while an op runs, a future is completed or the store is queried.
struct DynamicLane::State : std::enable_shared_from_this<DynamicLane::State> {
  explicit State(DynamicLaneOptions lane_options);

  const DynamicLaneOptions options;

  mutable std::mutex mutex;
  mutable std::condition_variable changed;
  std::deque<Pending> pending;  // the first one may be running
  bool running = false;
  int64_t done = 0;
  int64_t agreed = 0;             // jobs that the ranks have compared
  std::atomic<int64_t> round{0};  // of the last job that was posted
  bool stopped = false;
  std::exception_ptr failure;    // as it came
  std::exception_ptr explained;  // as callers get it
  std::vector<BucketStats> stats;
  OverlapClock clock;
  std::optional<c10::Stream> stream;
  LaneThread thread{"bagua-lane"};
  std::unique_ptr<LaneThread> explainer;  // of a failure that the board's thread has found

  std::string whoami() const;
  int64_t rounds_done() const { return round - (pending.empty() ? 0 : 1); }  // under the lock
  Whereabouts whereabouts() const;
  void run_next();
  void await_agreement();
  void run(Pending& entry, std::optional<BucketAccount>& account);
  BucketStats& stats_of(const Job& job);
  void fail(const std::exception_ptr& cause, FailurePoint point = FailurePoint::kInRound) noexcept;
  void end_with(const std::exception_ptr& cause, const FailureBoard::News& news,
                FailurePoint point = FailurePoint::kInRound) noexcept;
  std::exception_ptr explain(const std::exception_ptr& cause, Blame blame,
                             FailurePoint point) const noexcept;
  void check_communicators() noexcept;
  void on_news(const FailureBoard::News& news);
  void end_pending(const std::exception_ptr& error) noexcept;
  void abort_communicators(const std::string& reason) const noexcept;
};

std::string DynamicLane::State::whoami() const {
  const Group group = options.control->group();
  return concat("module '", options.name, "', rank ", group.rank, " of ", group.size, ", round ",
                round);
}

Whereabouts DynamicLane::State::whereabouts() const {
  const std::lock_guard lock(mutex);
  if (pending.empty()) return {round, false, concat("computing, ", done, " jobs are done")};
  const std::string& name = pending.front().job.plan->name;
  return {round, true, concat("bucket '", name, running ? "' is under way" : "' waits for others")};
}

void DynamicLane::State::await_agreement() {
  QueuedJobs mine{.incarnation = options.incarnation, .first = 0, .jobs = {}, .first_text = {}};
  {
    const std::lock_guard lock(mutex);
    if (done < agreed) return;
    mine.first = done + 1;
    mine.first_text = pending.front().text;
    for (const Pending& entry : pending) mine.jobs.push_back(entry.hash);
  }
  RECORD_FUNCTION("bagua::agreement", {});
  const size_t count = agree_on_jobs(*options.control, mine);
  const std::lock_guard lock(mutex);
  agreed += static_cast<int64_t>(count);
}

void DynamicLane::State::run(Pending& entry, std::optional<BucketAccount>& account) {
  const JobPlan& plan = *entry.job.plan;
  at::Tensor flat = entry.job.flat;
  if (!stream) stream = side_stream(flat.device());
  const c10::OptionalStreamGuard on_own_stream(stream);
  if (stream) entry.ready.block(*stream);
  const Round context{
      .number = entry.job.round, .grad_scale = entry.job.grad_scale, .bucket = plan.name};
  const BucketOp* current = nullptr;
  try {
    // By the tensor: mul_(Scalar) rounds the factor to the dtype of half-precision tensors.
    if (plan.scale != 1.0) flat.mul_(at::native::wrapped_scalar_tensor(plan.scale));
    for (const auto& op : plan.ops) {
      current = op.get();
      RECORD_FUNCTION("bagua::" + plan.name + "::" + op->describe(), {});
      op->run(flat, context);
    }
    for (const auto& communicator : options.ops) communicator->invalidate_if_aborted(flat);
  } catch (...) {
    std::rethrow_exception(
        with_context(concat("bucket '", plan.name, "' (", flat.nbytes(), " bytes), ",
                            current ? current->describe() : "before its first op", ": "),
                     std::current_exception()));
  }
  Future future;
  {
    const std::lock_guard lock(mutex);
    account->close(clock, entry.posted_ns, stats_of(entry.job));
    running = false;
    ++done;
    future = std::move(entry.future);
    pending.pop_front();
  }
  // Inside the stream guard, whose stream the future's event is recorded on.
  if (future) future->markCompleted(flat);
}

void DynamicLane::State::run_next() {
  {
    const std::lock_guard lock(mutex);
    if (failure || stopped) return;
  }
  try {
    await_agreement();
  } catch (const MismatchError& error) {
    const FailureBoard::News news{error.what(), Blame::kAllRanks};
    return end_with(error_of(news, whoami()), news);
  } catch (...) {
    return fail(with_context(whoami() + ": ", std::current_exception()));
  }
  std::optional<BucketAccount> account;
  Pending* entry = nullptr;
  {
    const std::lock_guard lock(mutex);
    if (failure || stopped) return;
    running = true;
    account.emplace(options.ops, clock);
    entry = &pending.front();
  }
  try {
    run(*entry, account);
  } catch (...) {
    fail(with_context(whoami() + ", ", std::current_exception()));
  }
}

BucketStats& DynamicLane::State::stats_of(const Job& job) {
  const JobPlan& plan = *job.plan;
  auto found = std::find_if(stats.begin(), stats.end(),
                            [&](const BucketStats& one) { return one.name == plan.name; });
  if (found == stats.end()) {
    stats.emplace_back();
    found = std::prev(stats.end());
    found->name = plan.name;
  }
  found->bytes = static_cast<int64_t>(job.flat.nbytes());
  found->ops.clear();
  for (const auto& op : plan.ops) found->ops.push_back(op->describe());
  return *found;
}

void DynamicLane::State::fail(const std::exception_ptr& cause, FailurePoint point) noexcept {
  end_with(cause, {message_of(cause), blame_of(cause)}, point);
}

void DynamicLane::State::end_with(const std::exception_ptr& cause, const FailureBoard::News& news,
                                  FailurePoint point) noexcept {
  {
    const std::lock_guard lock(mutex);
    if (failure || stopped) return;
    failure = cause;
  }
  if (options.board) options.board->publish(news.text, news.blame);
  abort_communicators(news.text);
  const std::exception_ptr error = explain(cause, news.blame, point);
  {
    const std::lock_guard lock(mutex);
    explained = error;
  }
  changed.notify_all();
  end_pending(error);
}

// Finds failures of work on a device whose job is done.
void DynamicLane::State::check_communicators() noexcept {
  try {
    for (const auto& communicator : options.ops) communicator->check();
  } catch (...) {
    fail(with_context(whoami() + ", after its buckets were put on the device: ",
                      std::current_exception()));
  }
}

std::exception_ptr DynamicLane::State::explain(const std::exception_ptr& cause, Blame blame,
                                               FailurePoint point) const noexcept {
  std::exception_ptr error = cause;
  try {
    if (options.board && blame != Blame::kAllRanks) {
      const Position position{.number = round,
                              .needed = round + (point == FailurePoint::kBetweenRounds ? 1 : 0)};
      error = diagnose(cause, position, *options.board);
    }
    if (options.on_error) options.on_error(error);
  } catch (...) {
    return std::current_exception();
  }
  return error;
}

// On the board's thread, which a diagnosis asks: another one must make it.
void DynamicLane::State::on_news(const FailureBoard::News& news) {
  const std::lock_guard lock(mutex);
  if (failure || stopped || pending.empty() || explainer) return;
  explainer = std::make_unique<LaneThread>("bagua-explain");
  explainer->post([shared = shared_from_this(),
                   news] { shared->end_with(error_of(news, shared->whoami()), news); },
                  LaneThread::Inherit::kNothing);
}

void DynamicLane::State::end_pending(const std::exception_ptr& error) noexcept {
  std::vector<Future> futures;
  {
    const std::lock_guard lock(mutex);
    // The entries stay: one of them may be running.
    for (Pending& entry : pending) {
      if (entry.future) futures.push_back(std::exchange(entry.future, nullptr));
    }
  }
  for (const Future& future : futures) future->setErrorIfNeeded(error);
}

void DynamicLane::State::abort_communicators(const std::string& reason) const noexcept {
  std::vector<std::shared_ptr<Communicator>> all{options.control};
  all.insert(all.end(), options.ops.begin(), options.ops.end());
  abort_all(all, reason);
}

DynamicLane::State::State(DynamicLaneOptions lane_options) : options(std::move(lane_options)) {
  BAGUA_CHECK_ARG(options.control, "a dynamic lane needs a control communicator.");
  for (const auto& communicator : options.ops) {
    BAGUA_CHECK_ARG(communicator && communicator != options.control,
                    "a dynamic lane's ops and its agreements need communicators of their own.");
  }
}

DynamicLane::DynamicLane(DynamicLaneOptions options)
    : state_(std::make_shared<State>(std::move(options))) {
  if (!state_->options.board) return;
  state_->options.board->beat_while_alive(
      state_.pointer(), [weak = std::weak_ptr(state_.pointer())](const auto& news) {
        if (const auto state = weak.lock()) state->on_news(news);
      });
}

DynamicLane::~DynamicLane() { stop(); }

DynamicLane::Future DynamicLane::post(Job job) {
  // Checks
  check();
  check_job(job);

  const at::Tensor flat = job.flat;
  std::string text =
      concat("bucket '", job.plan->name, "' of round ", job.round, ": ", flat.numel(), " x ",
             dtype_text(flat.scalar_type()), ", ", job.plan->description);
  const uint64_t hash = text_hash(text);
  const auto future =
      c10::make_intrusive<c10::ivalue::Future>(c10::TensorType::get(), devices_of(flat));
  StreamPoints ready(flat.device());
  ready.mark_current_stream();
  {
    std::unique_lock lock(state_->mutex);
    if (state_->failure || state_->stopped) {
      lock.unlock();
      check();
    }
    BAGUA_CHECK_ARG(job.round >= state_->round && job.round > 0, "job '", job.plan->name,
                    "': round ", job.round, " comes after round ", state_->round, ".");
    state_->round = job.round;
    state_->pending.push_back(
        {std::move(job), std::move(text), hash, future, std::move(ready), now_ns()});
  }
  state_->thread.post([shared = state_.pointer()] { shared->run_next(); });
  return future;
}

void DynamicLane::check() const {
  state_.check("the communication of a hook");
  State& state = *state_;
  state.check_communicators();
  std::unique_lock lock(state.mutex);
  if (state.failure) {
    state.changed.wait(lock, [&] { return state.explained != nullptr; });
    std::rethrow_exception(state.explained);
  }
  BAGUA_CHECK(!state.stopped, state.whoami(), ": the communication was stopped.");
}

void DynamicLane::abort(const std::string& reason) noexcept {
  if (!state_.here()) return;
  state_->fail(std::make_exception_ptr(Error(reason)));
}

void DynamicLane::interrupted() noexcept {
  if (!state_.here()) return;
  const int rank = state_->options.control->group().rank;
  abort(concat(state_->whoami(), ": rank ", rank,
               " was interrupted while it waited for its buckets"));
}

void DynamicLane::transport_failed(const std::string& reason) noexcept {
  if (!state_.here()) return;
  state_->fail(std::make_exception_ptr(TransportError(concat(state_->whoami(), ": ", reason))),
               FailurePoint::kBetweenRounds);
}

void DynamicLane::stop() noexcept {
  if (!state_.here()) return;
  State& state = *state_;
  int64_t rounds = 0;
  bool failed = false;
  std::unique_ptr<LaneThread> explainer;
  {
    const std::lock_guard lock(state.mutex);
    if (std::exchange(state.stopped, true)) return;
    failed = state.failure != nullptr;
    rounds = state.rounds_done();
    explainer = std::move(state.explainer);
  }
  // A rank that failed has published that: its exit is the consequence, not the cause.
  if (state.options.board && !failed) state.options.board->publish_exit(rounds);
  if (!state.thread.stop()) {
    state.abort_communicators("the communication of module '" + state.options.name +
                              "' was stopped");
  }
  state.end_pending(std::make_exception_ptr(
      Error(concat(state.whoami(), ": the communication was stopped before it was done."))));
}

EngineStats DynamicLane::stats() const {
  const State& state = *state_;
  const std::lock_guard lock(state.mutex);
  return {.buckets = state.stats,
          .control = state.options.control->traffic(),
          .rounds = state.rounds_done(),
          .busy_ns = state.clock.busy_ns(),
          .hidden_ns = 0,
          .exposed_ns = 0,
          .longest_wait_ns = 0};
}

}  // namespace bagua
