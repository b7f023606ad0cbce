// The end of a thread that may be blocked in a transport or a store.
#pragma once

#include <chrono>
#include <condition_variable>
#include <mutex>
#include <thread>

namespace bagua {

// Waits a second for the thread to set `finished`, then joins it; else leaves it to itself, with
// all that it refers to. `lock` is of the mutex that guards `finished`, and is open afterwards.
// True if the thread has ended.
inline bool join_or_leave(std::thread& thread, std::unique_lock<std::mutex>& lock,
                          std::condition_variable& changed, const bool& finished) {
  const bool ended = changed.wait_for(lock, std::chrono::seconds(1), [&] { return finished; });
  lock.unlock();
  if (ended) {
    thread.join();
  } else {
    thread.detach();
  }
  return ended;
}

}  // namespace bagua
