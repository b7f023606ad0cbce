// A thread that runs tasks in the order in which they were posted.
#pragma once

#include <functional>
#include <memory>
#include <string>

namespace bagua {

// Thread safety: post() and stop() from any one thread at a time. Tasks must not throw. The thread
// runs without the GIL, without autograd, and with the at::ThreadLocalState of the thread that
// posted the task. gloo cannot be interrupted: a task that is blocked in it ends only at the
// group's own timeout, so stop() waits one second for the running task, then detaches the thread,
// which owns everything the tasks refer to.
class LaneThread {
 public:
  explicit LaneThread(const std::string& name);
  ~LaneThread();
  LaneThread(const LaneThread&) = delete;
  LaneThread& operator=(const LaneThread&) = delete;

  // kNothing: the task may outlive what its caller is in, such as a profiler.
  enum class Inherit { kCaller, kNothing };
  void post(std::function<void()> task, Inherit inherit = Inherit::kCaller);

  // Drops tasks that have not started. Returns false if the thread had to be detached. Idempotent.
  bool stop() noexcept;

 private:
  struct State;
  std::shared_ptr<State> state_;
};

}  // namespace bagua
