#include "binding/interruptible.h"

#include <chrono>
#include <condition_variable>
#include <exception>
#include <memory>
#include <mutex>
#include <optional>
#include <utility>

#include <torch/csrc/utils/pybind.h>
#include <unistd.h>

#include "base/check_signals.h"
#include "engine/lane_thread.h"

namespace bagua {
namespace {

namespace py = pybind11;

bool on_main_thread() { return gettid() == getpid() && Py_IsInitialized(); }

// The end of a call on another thread, which may outlive its caller.
struct Outcome {
  std::mutex mutex;
  std::condition_variable changed;
  bool done = false;
  std::exception_ptr failure;

  void end_with(std::exception_ptr cause) {
    {
      const std::lock_guard lock(mutex);
      failure = std::move(cause);
      done = true;
    }
    changed.notify_all();
  }

  bool wait(std::chrono::milliseconds limit) {
    std::unique_lock lock(mutex);
    return changed.wait_for(lock, limit, [&] { return done; });
  }
};

// The thread for the main thread's calls, which has one at a time. It exists in the process that
// has made it, and is never ended: a call may be left in it.
LaneThread& helper(bool anew) {
  static std::pair<pid_t, LaneThread*> made{0, nullptr};
  if (anew || made.first != getpid()) made = {getpid(), new LaneThread("bagua-wait")};
  return *made.second;
}

}  // namespace

void run_interruptibly(const std::function<void()>& work) {
  std::optional<py::gil_scoped_release> no_gil;
  if (Py_IsInitialized() && PyGILState_Check()) no_gil.emplace();
  if (!on_main_thread()) return work();
  const auto outcome = std::make_shared<Outcome>();
  helper(/*anew=*/false).post([outcome, work] {
    try {
      work();
      outcome->end_with(nullptr);
    } catch (...) {
      outcome->end_with(std::current_exception());
    }
  });
  while (!outcome->wait(kBetweenSignals)) {
    try {
      check_signals();
    } catch (...) {
      helper(/*anew=*/true);
      throw;
    }
  }
  if (outcome->failure) std::rethrow_exception(outcome->failure);
}

void check_signals() {
  if (!on_main_thread()) return;
  const py::gil_scoped_acquire gil;
  if (PyErr_CheckSignals() != 0) throw py::error_already_set();
}

}  // namespace bagua
