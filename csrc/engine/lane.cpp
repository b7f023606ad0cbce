#include "engine/lane.h"

#include <algorithm>
#include <utility>

#include <ATen/record_function.h>
#include <c10/util/ScopeExit.h>

#include "base/check.h"
#include "comm/abort_all.h"
#include "health/failure.h"
#include "op/tensors/all_finite.h"

namespace bagua {

LaneCore::LaneCore(LaneOptions options)
    : core(std::move(options)), group((core.control ? core.control : core.ops.at(0))->group()) {}

void LaneCore::begin(News news, Watched watched) {
  if (!core.board) return;
  FailureBoard::OnNews end_waits;
  if (news == News::kEndWaits) {
    end_waits = [weak = weak_from_this()](const FailureBoard::News& found) {
      if (const auto self = weak.lock()) self->on_news(found);
    };
  }
  const auto where = [weak = weak_from_this()] {
    const auto self = weak.lock();
    return self ? std::optional(self->whereabouts()) : std::nullopt;
  };
  core.board->beat(where, std::move(end_waits), watched);
}

std::string LaneCore::whoami() const {
  return concat("module '", core.name, "', rank ", group.rank, " of ", group.size, ", ", place());
}

void LaneCore::fail(const std::exception_ptr& cause, FailurePoint point) noexcept {
  end_with(cause, {message_of(cause), blame_of(cause)}, point);
}

void LaneCore::end_with(const MismatchError& difference) noexcept {
  const FailureBoard::News news{difference.what(), Blame::kAllRanks};
  end_with(error_of(news, whoami()), news);
}

void LaneCore::end_with(const std::exception_ptr& cause, const FailureBoard::News& news,
                        FailurePoint point) noexcept {
  {
    const std::lock_guard lock(mutex);
    if (failure || stopped) return;
    failure = cause;
    blame_ = news.blame;
    failed_at_ = position();
    if (point == FailurePoint::kBetweenRounds) ++failed_at_->needed;
  }
  changed.notify_all();
  if (core.board) core.board->publish(news.text, news.blame);
  abort_communicators(news.text);
  on_failure();
}

void LaneCore::fail_and_throw(std::unique_lock<std::mutex>& lock, const std::exception_ptr& cause) {
  lock.unlock();
  fail(cause);
  lock.lock();
  if (failure) rethrow(lock);
  std::rethrow_exception(cause);
}

// On the board's thread, which publishing and a diagnosis ask: another one ends the lane.
void LaneCore::on_news(const FailureBoard::News& news) {
  if (!whereabouts().waits) return;  // any more
  const std::lock_guard lock(mutex);
  if (failure || stopped || teller_) return;
  teller_ = std::make_unique<LaneThread>("bagua-news");
  teller_->post([self = shared_from_this(), news,
                 me = whoami()] { self->end_with(error_of(news, me), news); },
                LaneThread::Inherit::kNothing);
}

void LaneCore::check_communicators() noexcept {
  try {
    for (const auto& communicator : core.ops) communicator->check();
  } catch (...) {
    fail(with_context(whoami() + ", after its buckets were put on the device: ",
                      std::current_exception()));
  }
}

std::exception_ptr LaneCore::explained() noexcept {
  std::call_once(explained_once_, [this] { explained_ = explain(); });
  return explained_;
}

std::exception_ptr LaneCore::explain() const noexcept {
  std::exception_ptr error = failure;
  try {
    if (core.board && blame_ != Blame::kAllRanks)
      error = diagnose(failure, *failed_at_, *core.board);
    if (core.on_error) core.on_error(error);
  } catch (...) {
    return std::current_exception();
  }
  return error;
}

void LaneCore::rethrow(std::unique_lock<std::mutex>& lock) {
  lock.unlock();
  std::rethrow_exception(explained());
}

bool LaneCore::await(std::unique_lock<std::mutex>& lock, Deadline deadline,
                     const std::function<bool()>& done, const char* what,
                     const std::function<void()>& between) {
  using std::chrono::steady_clock;
  clock.caller_blocks(now_ns());
  const auto goes_on = c10::make_scope_exit([this] { clock.caller_goes_on(now_ns()); });
  while (
      !changed.wait_until(lock, std::min(deadline, steady_clock::now() + kBetweenSignals), done)) {
    if (steady_clock::now() >= deadline) return false;
    const std::string me = whoami();
    lock.unlock();
    try {
      if (core.check_signals) core.check_signals();
    } catch (...) {
      fail(std::make_exception_ptr(
          Error(concat(me, ": rank ", group.rank, " was interrupted while it waited for ", what))));
      lock.lock();
      throw;
    }
    if (between) between();
    lock.lock();
  }
  return true;
}

bool LaneCore::stop(const std::string& reason, bool agreed) noexcept {
  int64_t rounds = 0;
  bool failed = false;
  std::string error;
  std::unique_ptr<LaneThread> teller;
  {
    const std::lock_guard lock(mutex);
    if (std::exchange(stopped, true)) return false;
    failed = failure != nullptr;
    error = error_of_caller();
    rounds = rounds_done();
    teller = std::move(teller_);
  }
  changed.notify_all();
  // A rank that failed has published that: its exit is the consequence, not the cause.
  if (core.board && !failed) {
    if (!error.empty()) {
      core.board->publish(error, Blame::kThisRank);
    } else if (!agreed) {
      core.board->publish_exit(rounds);
    }
  }
  interrupt();
  bool idle = true;
  for (const auto& thread : threads) idle = thread->stop() && idle;
  if (!idle) abort_communicators(reason);
  return true;
}

void LaneCore::abort_communicators(const std::string& reason) const noexcept {
  std::vector<std::shared_ptr<Communicator>> all(core.ops.begin(), core.ops.end());
  if (core.control) all.push_back(core.control);
  abort_all(all, reason);
}

std::optional<bool> run_ops(const LaneWork& work, const std::function<void()>& before) {
  const std::string& bucket = work.round.bucket;
  const BucketOp* running = nullptr;
  try {
    before();
    for (const auto& op : work.ops) {
      running = op.get();
      RECORD_FUNCTION("bagua::" + bucket + "::" + op->describe(), {});
      op->run(work.flat, work.round);
    }
    for (const auto& communicator : work.communicators) {
      communicator->invalidate_if_aborted(work.flat);
    }
    if (!work.flat.is_cpu()) return std::nullopt;
    return work.ops.empty() || all_finite(work.ops.back()->result(work.flat));
  } catch (...) {
    std::rethrow_exception(
        with_context(concat("bucket '", bucket, "' (", work.flat.nbytes(), " bytes), ",
                            running ? running->describe() : "before its first op", ": "),
                     std::current_exception()));
  }
}

}  // namespace bagua
