// One ncclComm_t: made, called, watched and ended.
#pragma once

#include <chrono>
#include <condition_variable>
#include <functional>
#include <memory>
#include <mutex>
#include <optional>
#include <string>

#include "comm/call_site.h"
#include "comm/communicator.h"
#include "comm/nccl/abort_flag.h"
#include "comm/nccl/nccl_functions.h"
#include "comm/nccl/nccl_library.h"

namespace bagua {

// Note [NCCL and threads]
// NCCL allows one thread at a time per communicator, and frees a communicator that is aborted. So
// each call into NCCL happens under the handle's mutex, a group from start to end under one lock,
// and abort takes the pointer away under the mutex before it hands it to ncclCommAbort: whoever
// comes later finds none. This needs calls that return at once, hence non-blocking mode: NCCL
// answers ncclInProgress, and the handle asks again, without the mutex between two questions.
// ncclCommAbort alone has no deadline: it waits for kernels that may stand behind another
// communicator's, whose peer is dead. So it has a thread that nothing joins.

// Why a handle works no more.
struct NcclFailure {
  enum class Kind { kError, kTimeout };
  Kind kind;
  std::string reason;
};

// A communicator of NCCL in non-blocking mode. In a group of one it owns nothing.
//
// Thread safety: call() and split() from the owner, everything else from any thread (see Note
// [NCCL and threads]); whatever device a thread is on, NCCL is called on the handle's. Ownership:
// of the ncclComm_t; the destructor flushes and destroys it, or aborts it if it has failed or does
// not get quiet in time, and leaves an abort that takes long to itself. May fail: the first failure
// stays, aborts the communicator, and every later call throws Error or TimeoutError with its
// reason.
class NcclHandle final {
 public:
  using Clock = std::chrono::steady_clock;
  using Milliseconds = std::chrono::milliseconds;
  using Body = std::function<ncclResult_t(const NcclFunctions&, ncclComm_t)>;
  // Asked now and then while the ranks connect: why this will not come to an end, or nothing.
  using Hopeless = std::function<std::optional<std::string>()>;

  // Owns no communicator: a group of one, or what split() fills.
  NcclHandle(std::shared_ptr<const NcclLibrary> library, Group group, at::Device device,
             Milliseconds timeout);
  ~NcclHandle();
  NcclHandle(const NcclHandle&) = delete;
  NcclHandle& operator=(const NcclHandle&) = delete;

  at::Device device() const { return device_; }
  Milliseconds timeout() const { return timeout_; }

  // Connects all ranks that have the same id. Throws TimeoutError at the deadline, with what
  // `missing` says by then.
  void connect(const ncclUniqueId& id, Clock::time_point deadline, const Hopeless& hopeless,
               const std::function<std::string()>& missing);

  // Runs `body` and returns once NCCL has put its work on the stream; does not wait for the stream.
  void call(const CallSite& site, const Body& body);

  // Collective over this handle: connects the ranks with the same color >= 0 in the order of key;
  // without a color this rank joins none, and `child` stays empty.
  void split(std::optional<int> color, int key, NcclHandle& child);

  // Throws what a call on a failed handle throws, asking NCCL first whether it has failed.
  void refuse_if_failed(const CallSite& site);

  // Error that NCCL reports about work already on the stream; nullopt: none.
  std::optional<std::string> asynchronous_error();

  // The first failure stays; aborts the communicator, and returns when its work on the stream has
  // ended: what it reads and writes may be freed then. Waits no longer than a call.
  void fail(NcclFailure failure) noexcept;
  // The same without waiting.
  void begin_to_fail(NcclFailure failure) noexcept;
  std::optional<NcclFailure> failure() const;

  // Raised before work on the stream is aborted.
  const AbortFlag& abort_flag() const { return abort_flag_; }

 private:
  std::string said(ncclResult_t result) const;
  std::optional<ncclResult_t> state(ncclComm_t comm) const;
  ncclResult_t until_ready(const std::string& what, Clock::time_point deadline);
  void until_written(NcclHandle& child, const std::string& what, Clock::time_point deadline);
  [[noreturn]] void fail_and_throw(NcclFailure::Kind kind, const std::string& what,
                                   const std::string& reason);
  [[noreturn]] void throw_failed(const std::string& what, std::unique_lock<std::mutex>& lock) const;
  void begin_abort(ncclComm_t comm) noexcept;
  void until_aborted(Clock::duration longest) const noexcept;
  void close() noexcept;

  // Shared with the thread that is inside ncclCommAbort, which may outlive the handle.
  struct Abort {
    std::mutex mutex;
    std::condition_variable ended;
    bool runs = false;
  };

  const std::shared_ptr<const NcclLibrary> library_;
  const NcclFunctions& nccl_;
  const Group group_;
  const at::Device device_;
  const Milliseconds timeout_;
  AbortFlag abort_flag_;
  mutable std::mutex mutex_;
  ncclComm_t comm_ = nullptr;
  std::optional<NcclFailure> failure_;
  const std::shared_ptr<Abort> abort_ = std::make_shared<Abort>();
};

}  // namespace bagua
