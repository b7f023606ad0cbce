#include "comm/nccl/nccl_watchdog.h"

#include <algorithm>
#include <exception>
#include <utility>

#include <c10/util/Exception.h>
#include <pthread.h>

#include "base/check.h"
#include "comm/device_stream.h"
#include "health/error_text.h"

namespace bagua {

using namespace std::chrono_literals;

// Events that are kept for later calls: those of as many calls as are in flight beside each other.
constexpr size_t kMostIdle = 128;

NcclWatchdog::NcclWatchdog(std::shared_ptr<NcclHandle> handle, Group group)
    : handle_(std::move(handle)), group_(group), thread_([this] { run(); }) {}

NcclWatchdog::~NcclWatchdog() {
  {
    std::lock_guard lock(mutex_);
    stopped_ = true;
  }
  changed_.notify_all();
  thread_.join();
}

c10::Event NcclWatchdog::recorded() {
  std::optional<c10::Event> event;
  {
    const std::lock_guard lock(mutex_);
    if (!idle_.empty()) {
      event = std::move(idle_.back());
      idle_.pop_back();
    }
  }
  const c10::Device device = handle_->device();
  if (!event) event.emplace(device.type());
  event->record(current_stream(device));
  return std::move(*event);
}

void NcclWatchdog::watch(const CallSite& site, c10::Event begins, c10::Event finished) {
  bool sleeps;
  {
    std::lock_guard lock(mutex_);
    sleeps = in_flight_.empty();
    in_flight_.push_back({site, std::move(begins), std::move(finished), std::nullopt});
  }
  if (sleeps) changed_.notify_all();
}

// 1. Sleep until something is in flight. 2. Look at intervals, until it has landed or failed.
// On the handle's device: torch sets a thread's device again after each call, and would make a
// context on the one that threads begin on.
void NcclWatchdog::run() {
  pthread_setname_np(pthread_self(), "bagua-nccl");
  const TriedDeviceGuard on_device(handle_->device());
  leave_captures_of_others_alone();
  const auto interval = std::clamp<std::chrono::milliseconds>(handle_->timeout() / 20, 1ms, 50ms);
  std::unique_lock lock(mutex_);
  while (true) {
    changed_.wait(lock, [this] { return stopped_ || !in_flight_.empty(); });
    const bool over = changed_.wait_for(lock, interval, [this] { return stopped_; });
    lock.unlock();
    if (over || !look()) forget_all();
    if (over) return;
    lock.lock();
  }
}

void NcclWatchdog::forget_all() {
  std::deque<Flight> forgotten;  // destroyed without the mutex
  std::vector<c10::Event> events;
  const std::lock_guard lock(mutex_);
  forgotten.swap(in_flight_);
  events.swap(idle_);
}

bool NcclWatchdog::look() {
  try {
    return land_finished();
  } catch (const std::exception& error) {
    handle_->begin_to_fail(
        {NcclFailure::Kind::kError, concat("the device reports: ", short_text(error))});
    return false;
  }
}

// Events are asked and destroyed without the mutex: watch() must not wait for the driver. Only this
// thread takes flights away, so the first one stays where it is.
bool NcclWatchdog::land_finished() {
  while (true) {
    Flight* first;
    {
      std::lock_guard lock(mutex_);
      if (in_flight_.empty()) return true;
      first = &in_flight_.front();
    }
    if (!first->finished.query()) {
      if (const auto error = handle_->asynchronous_error()) {
        fail(NcclFailure::Kind::kError, first->site, *error);
        return false;
      }
      if (!is_late(*first)) return true;
      fail(NcclFailure::Kind::kTimeout, first->site,
           concat("not finished on the device within ",
                  static_cast<double>(handle_->timeout().count()) / 1000,
                  " s: another rank is late, stuck or gone"));
      return false;
    }
    const auto landed = [this] {
      const std::lock_guard lock(mutex_);
      Flight flight = std::move(in_flight_.front());
      in_flight_.pop_front();
      if (idle_.size() + 2 <= kMostIdle) {
        idle_.push_back(std::move(flight.begins));
        idle_.push_back(std::move(flight.finished));
      }
      return flight;
    }();
  }
}

bool NcclWatchdog::is_late(Flight& flight) {
  const auto now = NcclHandle::Clock::now();
  if (!flight.deadline && flight.begins.query()) flight.deadline = now + handle_->timeout();
  return flight.deadline && now >= *flight.deadline;
}

void NcclWatchdog::fail(NcclFailure::Kind kind, const CallSite& site, const std::string& reason) {
  handle_->begin_to_fail({kind, concat("an earlier call failed (rank ", group_.rank, " of ",
                                       group_.size, ": ", site.text(), " failed: ", reason, ")")});
}

}  // namespace bagua
