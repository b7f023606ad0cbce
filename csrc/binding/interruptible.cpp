#include "binding/interruptible.h"

#include <future>
#include <memory>
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
  const auto task = std::make_shared<std::packaged_task<void()>>(work);
  std::future<void> outcome = task->get_future();
  helper(/*anew=*/false).post([task] { (*task)(); });
  while (outcome.wait_for(kBetweenSignals) != std::future_status::ready) {
    try {
      check_signals();
    } catch (...) {
      helper(/*anew=*/true);
      throw;
    }
  }
  outcome.get();
}

void check_signals() {
  if (!on_main_thread()) return;
  const py::gil_scoped_acquire gil;
  if (PyErr_CheckSignals() != 0) throw py::error_already_set();
}

}  // namespace bagua
