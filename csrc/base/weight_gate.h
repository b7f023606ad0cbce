// Exclusive access to the weights: for the training step, or for the lane that averages them.
#pragma once

#include <chrono>
#include <condition_variable>
#include <cstdint>
#include <mutex>

namespace bagua {

// Note [Gate]
// Asynchronous averaging reads and writes weights inside the gate. Training holds the gate from
// its forward to the end of the optimizer's step, and a waiting lane has priority: training
// leaves for microseconds only, so with a plain mutex the lane would hardly ever enter. Work of a
// lane inside is short and never waits for the network.
//
// Thread safety: enter() and leave() from training threads, which are one side and not exclusive
// among themselves; lane_enter() and lane_leave() from one lane; close() from any.
class WeightGate {
 public:
  // Training side. Waits for a lane that is inside or waiting. Idempotent: inside, it does
  // nothing.
  void enter() {
    std::unique_lock lock(mutex_);
    if (training_inside_) return;
    const auto start = Clock::now();
    changed_.wait(lock, [&] { return !lane_inside_ && (!lane_waits_ || closed_); });
    training_waited_ += Clock::now() - start;
    training_inside_ = true;
  }

  // Idempotent: outside, it does nothing.
  void leave() {
    std::unique_lock lock(mutex_);
    if (!training_inside_) return;
    training_inside_ = false;
    lock.unlock();
    changed_.notify_all();
  }

  // Waits until training is outside; false once the gate is closed.
  bool lane_enter() {
    std::unique_lock lock(mutex_);
    const auto start = Clock::now();
    lane_waits_ = true;
    changed_.wait(lock, [&] { return !training_inside_ || closed_; });
    lane_waits_ = false;
    lane_waited_ += Clock::now() - start;
    lane_inside_ = !closed_;
    return lane_inside_;
  }

  void lane_leave() {
    {
      std::lock_guard lock(mutex_);
      lane_inside_ = false;
    }
    changed_.notify_all();
  }

  // From now on no lane gets in, and training never waits for one that only wants to.
  void close() {
    {
      std::lock_guard lock(mutex_);
      closed_ = true;
    }
    changed_.notify_all();
  }

  // Whether the lane is kept outside by training.
  bool lane_waits() const {
    std::lock_guard lock(mutex_);
    return lane_waits_;
  }

  bool training_inside() const {
    std::lock_guard lock(mutex_);
    return training_inside_;
  }

  int64_t training_waited_ns() const { return read(training_waited_); }
  int64_t lane_waited_ns() const { return read(lane_waited_); }

 private:
  using Clock = std::chrono::steady_clock;

  int64_t read(const Clock::duration& total) const {
    std::lock_guard lock(mutex_);
    return std::chrono::duration_cast<std::chrono::nanoseconds>(total).count();
  }

  mutable std::mutex mutex_;
  std::condition_variable changed_;
  bool training_inside_ = false;
  bool lane_waits_ = false;
  bool lane_inside_ = false;
  bool closed_ = false;
  Clock::duration training_waited_{};
  Clock::duration lane_waited_{};
};

}  // namespace bagua
