// Compiled without ThreadSanitizer's instrumentation, like cuda_emulation.cpp: switching is no
// access to data. BAGUA_TSAN says that it is linked.
#include "emulation/fiber.h"

#include <cstdint>
#include <cstdlib>

#include <sys/mman.h>

#ifdef __SANITIZE_ADDRESS__
#include <sanitizer/common_interface_defs.h>
#endif

#ifdef BAGUA_TSAN
extern "C" {
void* __tsan_get_current_fiber();
void* __tsan_create_fiber(unsigned flags);
void __tsan_destroy_fiber(void* fiber);
void __tsan_switch_to_fiber(void* fiber, unsigned flags);
void __tsan_acquire(void* address);
void __tsan_release(void* address);
}
#endif

// Saves the callee's registers on the current stack, its top in *save, and restores those of the
// other stack.
extern "C" void bagua_switch_stack(void** save, void* load);
asm(R"(
.text
.globl bagua_switch_stack
.type bagua_switch_stack, @function
bagua_switch_stack:
  pushq %rbp
  pushq %rbx
  pushq %r12
  pushq %r13
  pushq %r14
  pushq %r15
  movq %rsp, (%rdi)
  movq %rsi, %rsp
  popq %r15
  popq %r14
  popq %r13
  popq %r12
  popq %rbx
  popq %rbp
  ret
.size bagua_switch_stack, .-bagua_switch_stack
)");

namespace bagua::emulation {

namespace {

constexpr size_t kStackBytes = size_t{256} << 10;
constexpr size_t kGuardBytes = 4096;
constexpr int kSavedRegisters = 6;
// The tops of the stacks differ by this much, in turns: at one place of their pages, a few stacks
// would fill the lines of the cache that all of them use.
constexpr size_t kColourBytes = 448;
constexpr size_t kColours = 64;

size_t next_colour = 0;

Fiber* running = nullptr;

#ifdef BAGUA_TSAN
constexpr unsigned kWithoutOrder = 1;  // switching orders nothing
#endif

}  // namespace

Fiber::Fiber() {
  void* memory = mmap(nullptr, kGuardBytes + kStackBytes, PROT_READ | PROT_WRITE,
                      MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
  if (memory == MAP_FAILED || mprotect(memory, kGuardBytes, PROT_NONE) != 0) std::abort();
  stack_ = static_cast<std::byte*>(memory) + kGuardBytes;
  unused_ = next_colour++ % kColours * kColourBytes;
#ifdef BAGUA_TSAN
  race_detector_ = __tsan_create_fiber(0);
#endif
}

Fiber::~Fiber() {
#ifdef BAGUA_TSAN
  __tsan_destroy_fiber(race_detector_);
#endif
  munmap(stack_ - kGuardBytes, kGuardBytes + kStackBytes);
}

void Fiber::start(void (*body)(void*), void* argument) {
  body_ = body;
  argument_ = argument;
  ended_ = false;
  if (top_ == nullptr) {
    // What bagua_switch_stack pops: the registers, and main as the address to return to. The word
    // above stands for main's own return address; main never returns.
    void** top = reinterpret_cast<void**>(stack_ + kStackBytes - unused_) - 2;
    *top = reinterpret_cast<void*>(&Fiber::main);
    for (int i = 0; i < kSavedRegisters; ++i) *--top = nullptr;
    top_ = top;
  }
  resume();
}

void Fiber::resume() {
  running = this;
#ifdef BAGUA_TSAN
  starters_race_detector_ = __tsan_get_current_fiber();
  __tsan_switch_to_fiber(race_detector_, kWithoutOrder);
#endif
#ifdef __SANITIZE_ADDRESS__
  __sanitizer_start_switch_fiber(&starters_fake_stack_, stack_, kStackBytes);
#endif
  bagua_switch_stack(&starters_top_, top_);
#ifdef __SANITIZE_ADDRESS__
  __sanitizer_finish_switch_fiber(starters_fake_stack_, nullptr, nullptr);
#endif
}

void Fiber::pause() {
#ifdef BAGUA_TSAN
  __tsan_switch_to_fiber(starters_race_detector_, kWithoutOrder);
#endif
#ifdef __SANITIZE_ADDRESS__
  __sanitizer_start_switch_fiber(&fake_stack_, starters_stack_, starters_stack_bytes_);
#endif
  bagua_switch_stack(&top_, starters_top_);
  enter();
}

void Fiber::enter() {
#ifdef __SANITIZE_ADDRESS__
  __sanitizer_finish_switch_fiber(fake_stack_, &starters_stack_, &starters_stack_bytes_);
#endif
}

void Fiber::main() {
  Fiber* const self = running;
  self->enter();
  while (true) {
    self->body_(self->argument_);
    self->ended_ = true;
    self->pause();
  }
}

void release([[maybe_unused]] void* address) {
#ifdef BAGUA_TSAN
  __tsan_release(address);
#endif
}

void acquire([[maybe_unused]] void* address) {
#ifdef BAGUA_TSAN
  __tsan_acquire(address);
#endif
}

}  // namespace bagua::emulation
