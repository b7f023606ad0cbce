#include "comm/nccl/nccl_handle.h"

#include <algorithm>
#include <atomic>
#include <system_error>
#include <thread>
#include <utility>

#include <c10/core/DeviceGuard.h>

#include "base/check.h"
#include "comm/device_stream.h"

namespace bagua {
namespace {

using Clock = NcclHandle::Clock;

// How long a healthy communicator may take to get quiet on all ranks when it is dropped. A rank
// that is still busy with something else must not hold up the one that drops its part.
constexpr std::chrono::seconds kLongestClose{10};
constexpr std::chrono::seconds kBetweenStateChecks{1};

// Most answers come within the time of a launch; after that there is no hurry.
class Pause {
 public:
  void operator()() {
    if (asked_++ < kEager) return std::this_thread::yield();
    std::this_thread::sleep_for(length_);
    length_ = std::min<std::chrono::microseconds>(2 * length_, kLongest);
  }

 private:
  static constexpr int kEager = 200;
  static constexpr std::chrono::microseconds kLongest{1000};
  int asked_ = 0;
  std::chrono::microseconds length_{20};
};

ncclConfig_t non_blocking() {
  ncclConfig_t config = NCCL_CONFIG_INITIALIZER;
  config.blocking = 0;
  config.splitShare = 0;  // children run beside their parent
  return config;
}

std::string seconds_text(NcclHandle::Milliseconds time) {
  return concat(static_cast<double>(time.count()) / 1000, " s");
}

[[noreturn]] void throw_as(NcclFailure::Kind kind, const std::string& message) {
  if (kind == NcclFailure::Kind::kTimeout) throw TimeoutError(message);
  throw TransportError(message);
}

}  // namespace

NcclHandle::NcclHandle(std::shared_ptr<const NcclLibrary> library, Group group, at::Device device,
                       Milliseconds timeout)
    : library_(std::move(library)),
      nccl_(*library_->functions),
      group_(group),
      device_(device),
      timeout_(timeout),
      abort_flag_(device) {}

NcclHandle::~NcclHandle() { close(); }

void NcclHandle::connect(const ncclUniqueId& id, Clock::time_point deadline,
                         const Hopeless& hopeless, const std::function<std::string()>& missing) {
  const std::string what = "connecting through NCCL";
  const c10::DeviceGuard on_device(device_);
  // 1. Start.
  ncclConfig_t config = non_blocking();
  ncclResult_t result;
  {
    std::lock_guard lock(mutex_);
    result = nccl_.comm_init_rank_config(&comm_, group_.size, id, group_.rank, &config);
  }
  // 2. Until it is ready, or will never be.
  auto next_look = Clock::now() + kBetweenStateChecks;
  for (Pause pause; result == ncclInProgress; pause()) {
    {
      std::unique_lock lock(mutex_);
      if (failure_) throw_failed(what, lock);
      result = state(comm_).value_or(ncclInternalError);
    }
    if (result != ncclInProgress) break;
    if (Clock::now() >= deadline) {
      fail_and_throw(NcclFailure::Kind::kTimeout, what,
                     concat("not done within ", seconds_text(timeout_), "; ", missing()));
    }
    if (Clock::now() < next_look) continue;
    if (const auto reason = hopeless()) fail_and_throw(NcclFailure::Kind::kError, what, *reason);
    next_look = Clock::now() + kBetweenStateChecks;
  }
  if (result != ncclSuccess) fail_and_throw(NcclFailure::Kind::kError, what, said(result));
}

void NcclHandle::call(const CallSite& site, const Body& body) {
  const c10::DeviceGuard on_device(device_);
  const auto deadline = Clock::now() + timeout_;
  ncclResult_t result;
  {
    std::unique_lock lock(mutex_);
    if (failure_) throw_failed(site.text(), lock);
    result = body(nccl_, comm_);
  }
  if (result == ncclInProgress) result = until_ready(site.text(), deadline);
  if (result != ncclSuccess) fail_and_throw(NcclFailure::Kind::kError, site.text(), said(result));
}

void NcclHandle::split(std::optional<int> color, int key, NcclHandle& child) {
  const std::string what = "split";
  const c10::DeviceGuard on_device(device_);
  const auto deadline = Clock::now() + timeout_;
  // 1. All ranks of the parent ask; without a color a rank gets none.
  ncclConfig_t config = non_blocking();
  ncclResult_t result;
  {
    std::unique_lock lock(mutex_);
    if (failure_) throw_failed(what, lock);
    result =
        nccl_.comm_split(comm_, color.value_or(NCCL_SPLIT_NOCOLOR), key, &child.comm_, &config);
  }
  // 2. The parent comes to rest. NCCL 2.18 to 2.29 answer ncclSuccess while it is in progress.
  if (result == ncclSuccess || result == ncclInProgress) result = until_ready(what, deadline);
  if (result != ncclSuccess) fail_and_throw(NcclFailure::Kind::kError, what, said(result));
  if (!color) return;
  // 3. The child is there, then ready: it may still be connecting.
  until_written(child, what, deadline);
  const ncclResult_t connected = child.until_ready(what, deadline);
  if (connected != ncclSuccess) {
    child.fail_and_throw(NcclFailure::Kind::kError, what, said(connected));
  }
}

// A thread of NCCL writes the pointer, at some time after the parent has come to rest. Where that
// fails the parent is aborted, which joins the thread: nothing writes into a freed child.
void NcclHandle::until_written(NcclHandle& child, const std::string& what,
                               Clock::time_point deadline) {
  for (Pause pause; !std::atomic_ref(child.comm_).load(std::memory_order_acquire); pause()) {
    const ncclResult_t now = until_ready(what, deadline);
    if (now != ncclSuccess) fail_and_throw(NcclFailure::Kind::kError, what, said(now));
    if (Clock::now() < deadline) continue;
    fail_and_throw(NcclFailure::Kind::kTimeout, what,
                   concat("NCCL did not make the new group within ", seconds_text(timeout_)));
  }
}

void NcclHandle::refuse_if_failed(const CallSite& site) {
  if (const auto error = asynchronous_error()) {
    fail({NcclFailure::Kind::kError, concat("an earlier call failed: ", *error)});
  }
  std::lock_guard lock(mutex_);
  if (!failure_) return;
  const std::string message = concat("rank ", group_.rank, " of ", group_.size, ": ", site.call,
                                     " refused: ", failure_->reason);
  throw_as(failure_->kind, message);
}

std::optional<std::string> NcclHandle::asynchronous_error() {
  std::lock_guard lock(mutex_);
  if (!comm_) return std::nullopt;
  const ncclResult_t now = state(comm_).value_or(ncclInternalError);
  if (now == ncclSuccess || now == ncclInProgress) return std::nullopt;
  return said(now);
}

void NcclHandle::fail(NcclFailure failure) noexcept {
  begin_to_fail(std::move(failure));
  until_aborted(timeout_);
}

void NcclHandle::begin_to_fail(NcclFailure failure) noexcept {
  std::lock_guard lock(mutex_);
  if (!failure_) failure_ = std::move(failure);
  begin_abort(std::exchange(comm_, nullptr));
}

void NcclHandle::begin_abort(ncclComm_t comm) noexcept {
  if (!comm) return;
  abort_flag_.raise();
  {
    std::lock_guard lock(abort_->mutex);
    abort_->runs = true;
  }
  const auto run = [library = library_, device = device_, abort = abort_, comm] {
    leave_captures_of_others_alone();
    {
      const TriedDeviceGuard on_device(device);
      library->functions->comm_abort(comm);
    }
    std::lock_guard lock(abort->mutex);
    abort->runs = false;
    abort->ended.notify_all();
  };
  try {
    std::thread(run).detach();
  } catch (const std::system_error&) {  // the machine has no thread left
    run();
  }
}

void NcclHandle::until_aborted(Clock::duration longest) const noexcept {
  std::unique_lock lock(abort_->mutex);
  abort_->ended.wait_for(lock, longest, [this] { return !abort_->runs; });
}

std::optional<NcclFailure> NcclHandle::failure() const {
  std::lock_guard lock(mutex_);
  return failure_;
}

// "remote process exited or there was a network error (...)".
std::string NcclHandle::said(ncclResult_t result) const {
  const std::string name = concat("NCCL reports ", nccl_.get_error_string(result));
  const char* last = nccl_.get_last_error ? nccl_.get_last_error(nullptr) : nullptr;
  return last && *last ? concat(name, " (", last, ")") : name;
}

// Expects the mutex to be held.
std::optional<ncclResult_t> NcclHandle::state(ncclComm_t comm) const {
  ncclResult_t now = ncclSuccess;
  if (!comm || nccl_.comm_get_async_error(comm, &now) != ncclSuccess) return std::nullopt;
  return now;
}

ncclResult_t NcclHandle::until_ready(const std::string& what, Clock::time_point deadline) {
  for (Pause pause;; pause()) {
    {
      std::unique_lock lock(mutex_);
      if (failure_) throw_failed(what, lock);
      const ncclResult_t now = state(comm_).value_or(ncclInternalError);
      if (now != ncclInProgress) return now;
    }
    if (Clock::now() >= deadline) {
      fail_and_throw(NcclFailure::Kind::kTimeout, what,
                     concat("NCCL could not start it within ", seconds_text(timeout_),
                            ": another rank is late, stuck or gone"));
    }
  }
}

void NcclHandle::fail_and_throw(NcclFailure::Kind kind, const std::string& what,
                                const std::string& reason) {
  const std::string message =
      concat("rank ", group_.rank, " of ", group_.size, ": ", what, " failed: ", reason);
  fail({kind, concat("an earlier call failed (", message, ")")});
  throw_as(kind, message);
}

// Somebody else ended the communicator while `what` was under way.
void NcclHandle::throw_failed(const std::string& what, std::unique_lock<std::mutex>& lock) const {
  const NcclFailure failure = *failure_;
  lock.unlock();
  until_aborted(timeout_);
  const std::string message =
      concat("rank ", group_.rank, " of ", group_.size, ": ", what, " failed: ", failure.reason);
  throw_as(failure.kind, message);
}

// Not ncclCommAbort at once: what this rank has sent may still wait in its buffers, and a peer for
// it. Nobody else uses the handle any more, hence no lock.
void NcclHandle::close() noexcept {
  const auto longest = std::min<Clock::duration>(timeout_, kLongestClose);
  if (!comm_) return until_aborted(longest);
  const TriedDeviceGuard on_device(device_);
  const auto deadline = Clock::now() + longest;
  ncclResult_t now = nccl_.comm_finalize(comm_);
  for (Pause pause; now == ncclInProgress && Clock::now() < deadline; pause()) {
    now = state(comm_).value_or(ncclInternalError);
  }
  const ncclComm_t comm = std::exchange(comm_, nullptr);
  if (now == ncclSuccess) {
    nccl_.comm_destroy(comm);
    return;
  }
  begin_abort(comm);
  until_aborted(longest);
}

}  // namespace bagua
