#include "engine/lane_thread.h"

#include <condition_variable>
#include <deque>
#include <mutex>
#include <optional>
#include <thread>
#include <utility>

#include <ATen/ThreadLocalState.h>
#include <ATen/core/grad_mode.h>
#include <c10/core/impl/LocalDispatchKeySet.h>
#include <pthread.h>

#include "base/drop.h"
#include "base/join_or_leave.h"

namespace bagua {

struct LaneThread::State {
  struct Task {
    std::optional<at::ThreadLocalState> caller;  // so that torch.profiler sees the ops of a lane
    std::function<void()> run;
  };

  std::mutex mutex;
  std::condition_variable changed;
  std::deque<Task> tasks;
  bool stopping = false;
  bool finished = false;
  std::thread thread;

  void loop() {
    std::unique_lock lock(mutex);
    while (true) {
      changed.wait(lock, [&] { return stopping || !tasks.empty(); });
      if (stopping) break;
      Task task = std::move(tasks.front());
      tasks.pop_front();
      lock.unlock();
      run(task);
      drop(std::move(task));  // before completion is visible to anyone who waits for the lane
      lock.lock();
    }
    finished = true;
    changed.notify_all();
  }

  static void run(Task& task) {
    std::optional<at::ThreadLocalStateGuard> as_caller;
    if (task.caller) as_caller.emplace(*task.caller);
    at::NoGradGuard no_grad;
    // The caller's Python modes and autocast are not for the ops of a lane.
    c10::impl::ExcludeDispatchKeyGuard no_python(
        c10::DispatchKeySet({c10::DispatchKey::Python, c10::DispatchKey::PythonTLSSnapshot}) |
        c10::autocast_dispatch_keyset);
    task.run();
  }
};

LaneThread::LaneThread(const std::string& name) : state_(std::make_shared<State>()) {
  state_->thread = std::thread([state = state_] { state->loop(); });
  pthread_setname_np(state_->thread.native_handle(), name.substr(0, 15).c_str());
}

LaneThread::~LaneThread() { stop(); }

void LaneThread::post(std::function<void()> task, Inherit inherit) {
  std::optional<at::ThreadLocalState> caller;
  if (inherit == Inherit::kCaller) caller.emplace();
  {
    std::lock_guard lock(state_->mutex);
    if (state_->stopping) return;
    state_->tasks.push_back({std::move(caller), std::move(task)});
  }
  state_->changed.notify_all();
}

bool LaneThread::stop() noexcept {
  std::deque<State::Task> dropped;
  std::unique_lock lock(state_->mutex);
  if (!state_->thread.joinable()) return true;
  state_->stopping = true;
  dropped.swap(state_->tasks);
  state_->changed.notify_all();
  return join_or_leave(state_->thread, lock, state_->changed, state_->finished);
}

}  // namespace bagua
