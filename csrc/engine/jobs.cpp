#include "engine/jobs.h"

#include <algorithm>
#include <atomic>
#include <deque>
#include <mutex>
#include <optional>
#include <utility>

#include <ATen/ScalarOps.h>
#include <ATen/record_function.h>

#include "base/check.h"
#include "comm/device_stream.h"
#include "comm/tensor_checks.h"
#include "engine/job_agreement.h"
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

double factor_of(const Job& job, const Weighing& weighing) {
  if (job.weighed == Weighed::kNot) return 1.0;
  return job.weighed == Weighed::kHere ? weighing.factor(job.samples)
                                       : weighing.factor_of_multiplied();
}

LaneOptions checked(LaneOptions options) {
  BAGUA_CHECK_ARG(options.control, "a dynamic lane needs a control communicator.");
  for (const auto& communicator : options.ops) {
    BAGUA_CHECK_ARG(communicator && communicator != options.control,
                    "a dynamic lane's ops and its agreements need separate communicators.");
  }
  return options;
}

}  // namespace

// Jobs in call order, each with its future.
struct DynamicLane::State final : LaneCore {
  State(LaneOptions options, uint64_t number)
      : LaneCore(checked(std::move(options))), incarnation(number) {
    threads.push_back(std::make_unique<LaneThread>("bagua-lane"));
  }

  const uint64_t incarnation;
  std::deque<Pending> pending;  // the first one may be running
  bool running = false;
  std::string outside;  // waits_outside()
  int64_t done = 0;
  int64_t agreed = 0;  // jobs that the ranks have compared
  Weighing weighing;   // of these jobs
  std::atomic<double> weight{1.0};
  std::atomic<int64_t> round{0};  // of the last job that was posted
  std::vector<BucketStats> stats;
  std::optional<c10::Stream> stream;

  Whereabouts whereabouts() const override;
  std::string place() const override { return concat("round ", round.load()); }
  Position position() const override { return {.number = round}; }
  int64_t rounds_done() const override { return round - (pending.empty() ? 0 : 1); }
  void on_failure() noexcept override { end_pending(explained()); }

  void run_next();
  void await_agreement();
  void run(Pending& entry, std::optional<BucketAccount>& account);
  BucketStats& stats_of(const Job& job);
  void end_pending(const std::exception_ptr& error) noexcept;
  void wake_waiters() noexcept;
};

Whereabouts DynamicLane::State::whereabouts() const {
  const std::lock_guard lock(mutex);
  if (pending.empty() && !outside.empty()) return {round, true, outside};
  if (pending.empty()) return {round, false, concat("computing, ", done, " jobs are done")};
  const std::string& name = pending.front().job.plan->name;
  return {round, true, concat("bucket '", name, running ? "' is under way" : "' waits for others")};
}

void DynamicLane::State::await_agreement() {
  QueuedJobs mine{.incarnation = incarnation, .first = 0, .jobs = {}, .first_text = {}};
  {
    const std::lock_guard lock(mutex);
    if (done < agreed) return;
    mine.first = done + 1;
    mine.first_text = pending.front().text;
    mine.samples = pending.front().job.samples;
    for (const Pending& entry : pending) {
      if (entry.job.samples != mine.samples) break;
      mine.jobs.push_back(entry.hash);
    }
  }
  RECORD_FUNCTION("bagua::agreement", {});
  const AgreedJobs found = agree_on_jobs(*core.control, mine);
  const std::lock_guard lock(mutex);
  agreed += static_cast<int64_t>(found.count);
  weighing = found.weighing;
}

void DynamicLane::State::run(Pending& entry, std::optional<BucketAccount>& account) {
  const JobPlan& plan = *entry.job.plan;
  at::Tensor flat = entry.job.flat;
  if (!stream) stream = side_stream(flat.device());
  const c10::OptionalStreamGuard on_own_stream(stream);
  const double factor = factor_of(entry.job, weighing);
  if (entry.job.weighed != Weighed::kNot) weight = weighing.factor(entry.job.samples);
  const std::optional<bool> finite =
      run_ops({.flat = flat,
               .ops = plan.ops,
               .communicators = core.ops,
               .round = {.number = entry.job.round,
                         .grad_scale = entry.job.grad_scale,
                         .bucket = plan.name}},
              [&] {
                if (stream) entry.ready.block(*stream);
                // By the tensor: mul_(Scalar) rounds the factor to the dtype of half-precision
                // tensors.
                if (plan.scale != 1.0) flat.mul_(at::native::wrapped_scalar_tensor(plan.scale));
                weigh(flat, factor);
              });
  Future future;
  {
    const std::lock_guard lock(mutex);
    account->close(clock, entry.posted_ns, finite, stats_of(entry.job));
    running = false;
    ++done;
    future = std::move(entry.future);
    pending.pop_front();
  }
  // Inside the stream guard, whose stream the future's event is recorded on.
  if (future) future->markCompleted(flat);
  wake_waiters();
}

void DynamicLane::State::wake_waiters() noexcept {
  const std::lock_guard lock(mutex);  // one that has just looked waits by now
  changed.notify_all();
}

void DynamicLane::State::run_next() {
  {
    const std::lock_guard lock(mutex);
    if (failure || stopped) return;
  }
  try {
    await_agreement();
  } catch (const MismatchError& difference) {
    return end_with(difference);
  } catch (...) {
    return fail(with_context(whoami() + ": ", std::current_exception()));
  }
  std::optional<BucketAccount> account;
  Pending* entry = nullptr;
  {
    const std::lock_guard lock(mutex);
    if (failure || stopped) return;
    running = true;
    account.emplace(core.ops, clock);
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
  wake_waiters();
}

DynamicLane::DynamicLane(LaneOptions options, uint64_t incarnation)
    : state_(std::make_shared<State>(std::move(options), incarnation)) {
  // Torch waits for the futures, and tells nobody.
  state_->begin(LaneCore::News::kEndWaits, Watched::kYes);
}

DynamicLane::~DynamicLane() { stop(); }

DynamicLane::Future DynamicLane::post(Job job) {
  // Checks
  check();
  check_job(job);
  refuse_capture(job.flat.device());

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
  state_->threads[0]->post([shared = state_.pointer()] { shared->run_next(); });
  return future;
}

void DynamicLane::check() const {
  state_.check("the communication of a hook");
  State& state = *state_;
  state.check_communicators();
  std::unique_lock lock(state.mutex);
  if (state.failure) state.rethrow(lock);
  BAGUA_CHECK(!state.stopped, state.whoami(), ": the communication was stopped.");
}

void DynamicLane::abort(const std::string& reason) noexcept {
  if (!state_.here()) return;
  state_->fail(std::make_exception_ptr(Error(reason)));
}

void DynamicLane::wait(const std::vector<Future>& futures) {
  const auto completed = [&] {
    return std::all_of(futures.begin(), futures.end(),
                       [](const Future& one) { return one->completed(); });
  };
  std::unique_lock lock(state_->mutex);
  state_->await(lock, LaneCore::Deadline::max(), completed, "its buckets");
}

void DynamicLane::transport_failed(const std::string& reason) noexcept {
  if (!state_.here()) return;
  state_->fail(std::make_exception_ptr(TransportError(concat(state_->whoami(), ": ", reason))),
               FailurePoint::kBetweenRounds);
}

void DynamicLane::waits_outside(std::string text) noexcept {
  if (!state_.here()) return;
  const std::lock_guard lock(state_->mutex);
  state_->outside = std::move(text);
}

double DynamicLane::weight() const noexcept { return state_.here() ? state_->weight.load() : 1.0; }

void DynamicLane::stop() noexcept {
  if (!state_.here()) return;
  if (!state_->stop("the communication of module '" + state_->core.name + "' was stopped")) return;
  state_->end_pending(std::make_exception_ptr(
      Error(concat(state_->whoami(), ": the communication was stopped before it was done."))));
}

EngineStats DynamicLane::stats() const {
  const State& state = *state_;
  const std::lock_guard lock(state.mutex);
  return {.buckets = state.stats,
          .control = state.core.control->traffic(),
          .rounds = state.rounds_done(),
          .busy_ns = state.clock.busy_ns(),
          .hidden_ns = 0,
          .exposed_ns = 0,
          .longest_wait_ns = 0};
}

}  // namespace bagua
