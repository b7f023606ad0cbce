// Notices that work on the stream does not come to an end.
#pragma once

#include <chrono>
#include <condition_variable>
#include <deque>
#include <memory>
#include <mutex>
#include <optional>
#include <thread>
#include <vector>

#include <c10/core/Event.h>

#include "comm/call_site.h"
#include "comm/nccl/nccl_handle.h"

namespace bagua {

// A thread that looks after the calls of one handle: when one does not finish on the GPU within the
// handle's timeout, or NCCL reports an error, it fails the handle with words that name the call,
// without waiting for the abort.
// The timeout counts from the moment at which the stream has come to the call: work of the caller's
// in front of it may take as long as it likes. It sleeps while no call is in flight.
//
// Thread safety: recorded() and watch() from the owner. The destructor joins; what is in flight is
// forgotten. A process that forks or ends must not run the destructor in the child, nor wait for
// the thread.
class NcclWatchdog final {
 public:
  NcclWatchdog(std::shared_ptr<NcclHandle> handle, Group group);
  ~NcclWatchdog();
  NcclWatchdog(const NcclWatchdog&) = delete;
  NcclWatchdog& operator=(const NcclWatchdog&) = delete;

  // An event in front of a call or behind it, recorded on the calling thread's current stream: one
  // of an earlier call that has ended, or a new one.
  c10::Event recorded();

  // begins, finished: recorded() before the call and after it.
  void watch(const CallSite& site, c10::Event begins, c10::Event finished);

 private:
  struct Flight {
    CallSite site;
    c10::Event begins;
    c10::Event finished;
    std::optional<NcclHandle::Clock::time_point> deadline;  // nullopt: has not begun
  };

  void run();
  bool look();
  bool land_finished();
  bool is_late(Flight& flight);
  void forget_all();
  void fail(NcclFailure::Kind kind, const CallSite& site, const std::string& reason);

  const std::shared_ptr<NcclHandle> handle_;
  const Group group_;
  std::mutex mutex_;
  std::condition_variable changed_;
  std::deque<Flight> in_flight_;  // in the order of the calls
  std::vector<c10::Event> idle_;  // at most kMostIdle
  bool stopped_ = false;
  std::thread thread_;
};

}  // namespace bagua
