// Stacks to switch between, known to Address- and ThreadSanitizer. Linux on x86-64 only.
#pragma once

#include <cstddef>

namespace bagua::emulation {

// A function that runs on a separate stack until it returns, in turns with its starter.
// One at a time per program: fibers start no fibers and belong to one thread.
class Fiber {
 public:
  Fiber();
  ~Fiber();
  Fiber(const Fiber&) = delete;
  Fiber& operator=(const Fiber&) = delete;

  // Runs body(argument), or goes on with it after pause(), until it pauses or ends. A body that has
  // ended may be followed by another.
  void start(void (*body)(void*), void* argument);
  void resume();
  bool ended() const { return ended_; }

  // Called on the fiber: back to the caller of start or resume.
  void pause();

 private:
  static void main();
  void enter();

  std::byte* stack_;
  size_t unused_;  // bytes at its top
  void* top_ = nullptr;
  void* starters_top_ = nullptr;
  void (*body_)(void*) = nullptr;
  void* argument_ = nullptr;
  bool ended_ = true;
  // The sanitizers' side of it.
  void* race_detector_ = nullptr;
  void* starters_race_detector_ = nullptr;
  void* fake_stack_ = nullptr;
  void* starters_fake_stack_ = nullptr;
  const void* starters_stack_ = nullptr;
  size_t starters_stack_bytes_ = 0;
};

// To the race detector: what this fiber did so far comes before what happens behind an `acquire` of
// the same address. Nothing else orders fibers.
void release(void* address);
void acquire(void* address);

}  // namespace bagua::emulation
