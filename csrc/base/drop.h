// How threads of ours drop what Python may know.
#pragma once

#include <atomic>
#include <chrono>
#include <thread>
#include <utility>

namespace bagua {

// Note [Drops at exit]
// Who drops the last reference to an object of Python, or to a tensor that Python knows, needs the
// GIL. An interpreter that ends ends each thread that asks for it, and within a destructor that is
// std::terminate: the script's exit status is lost. A thread may be late by any time, on a busy
// machine, or since it was detached. So what it drops last it drops here.

struct Drops {
  inline static std::atomic<int> under_way{0};
  inline static std::atomic<bool> over{false};
};

// Destroys the object; once the interpreter ends, keeps it.
template <typename T>
void drop(T object) noexcept {
  ++Drops::under_way;
  if (Drops::over) {
    static_cast<void>(new T(std::move(object)));
  } else {
    static_cast<void>(T(std::move(object)));
  }
  --Drops::under_way;
}

// Calls `use`, which needs the GIL, unless the interpreter ends.
template <typename Use>
void before_end(const Use& use) {
  ++Drops::under_way;
  if (!Drops::over) use();
  --Drops::under_way;
}

// From now on nothing is destroyed by drop(). Waits a second for those that have begun, which may
// need the GIL: the caller does not hold it.
inline void end_drops() noexcept {
  const auto deadline = std::chrono::steady_clock::now() + std::chrono::seconds(1);
  Drops::over = true;
  while (Drops::under_way != 0 && std::chrono::steady_clock::now() < deadline) {
    std::this_thread::sleep_for(std::chrono::milliseconds(1));
  }
}

}  // namespace bagua
