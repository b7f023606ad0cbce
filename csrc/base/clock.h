// The time of waits: the machine's, or one that a test turns.
#pragma once

#include <chrono>
#include <condition_variable>
#include <functional>
#include <mutex>

namespace bagua {

// Thread safety: all methods from any thread.
class Clock {
 public:
  virtual ~Clock() = default;

  // Time since a moment that never changes.
  virtual std::chrono::milliseconds now() = 0;

  // Waits on `changed`, whose mutex `lock` holds, until `over()` is true or `limit` has passed.
  // True if `over()` is.
  virtual bool wait_for(std::unique_lock<std::mutex>& lock, std::condition_variable& changed,
                        std::chrono::milliseconds limit, const std::function<bool()>& over) = 0;
};

class SteadyClock final : public Clock {
 public:
  std::chrono::milliseconds now() override {
    const auto passed = std::chrono::steady_clock::now().time_since_epoch();
    return std::chrono::duration_cast<std::chrono::milliseconds>(passed);
  }

  bool wait_for(std::unique_lock<std::mutex>& lock, std::condition_variable& changed,
                std::chrono::milliseconds limit, const std::function<bool()>& over) override {
    return changed.wait_for(lock, limit, over);
  }
};

// For tests: time passes when it is turned. A wait that has begun ends when it is turned by its
// limit, however long that takes.
class ManualClock final : public Clock {
 public:
  std::chrono::milliseconds now() override {
    const std::lock_guard lock(mutex_);
    ++readings_;
    return now_;
  }

  bool wait_for(std::unique_lock<std::mutex>& lock, std::condition_variable& changed,
                std::chrono::milliseconds limit, const std::function<bool()>& over) override {
    const auto end = begin_wait() + limit;
    // Nobody can wake `changed` when the clock is turned without the mutex of `lock`: it looks.
    const std::chrono::milliseconds between_looks(1);
    while (!changed.wait_for(lock, between_looks, over) && !passed(end)) {
    }
    end_wait();
    return over();
  }

  void turn(std::chrono::milliseconds by) {
    const std::lock_guard lock(mutex_);
    now_ += by;
  }

  // Calls of now() so far.
  int readings() const {
    const std::lock_guard lock(mutex_);
    return readings_;
  }

  // Waits that have begun and not ended.
  int waiting() const {
    const std::lock_guard lock(mutex_);
    return waiting_;
  }

 private:
  bool passed(std::chrono::milliseconds end) const {
    const std::lock_guard lock(mutex_);
    return now_ >= end;
  }

  std::chrono::milliseconds begin_wait() {
    const std::lock_guard lock(mutex_);
    ++waiting_;
    return now_;
  }

  void end_wait() {
    const std::lock_guard lock(mutex_);
    --waiting_;
  }

  mutable std::mutex mutex_;
  std::chrono::milliseconds now_{0};
  int readings_ = 0;
  int waiting_ = 0;
};

}  // namespace bagua
