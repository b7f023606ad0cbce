#include "emulation/cuda_emulation.h"

#include <algorithm>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <deque>
#include <numeric>
#include <random>
#include <set>
#include <span>
#include <string>
#include <vector>

#include <link.h>

#include "emulation/fiber.h"

dim3 threadIdx;
dim3 blockIdx;
dim3 blockDim;
dim3 gridDim;

namespace bagua::emulation {

namespace {

constexpr unsigned kLanes = 32;

enum class Waits { kNot, kForBarrier, kForWarp };

// A CUDA thread, and what it waits for.
struct Thread {
  unsigned index = 0;
  const std::function<void()>* body = nullptr;
  Waits waits = Waits::kNot;
  Location location;
  int barriers = 0;
  // Of the operation of its warp.
  WarpOperation operation{};
  unsigned mask = 0;
  unsigned lane = 0;
  uint64_t value = 0;
  uint64_t result = 0;
  // Addresses for release and acquire, used in turns: the lane may meet its next __syncwarp before
  // another one has left this one. `turns`: bit i is the turn of lane i in the last __syncwarp.
  char order[2] = {};
  unsigned turn = 0;
  uint32_t turns = 0;
};

// The threads of the CTA that runs; those of one CTA are used again for the next.
const char* kernel_name = "";
unsigned running_threads = 0;
std::deque<Thread> threads;
std::deque<Fiber> fibers;
Thread* current = nullptr;
// More such addresses: of the start of a CTA, of its end and of its barriers, in turns.
char start_order = 0;
char end_order = 0;
char barrier_order[2] = {};

// The same in every run, so that what it finds is found again.
std::mt19937_64 random_words;

// All shared memory: the thread-local memory of the program itself, which comes first.
std::span<std::byte> shared_memory() {
  static const std::span<std::byte> found = [] {
    std::span<std::byte> own;
    dl_iterate_phdr(
        [](dl_phdr_info* program, size_t, void* result) {
          const std::span segments(program->dlpi_phdr, program->dlpi_phnum);
          for (const auto& segment : segments) {
            if (segment.p_type != PT_TLS) continue;
            *static_cast<std::span<std::byte>*>(result) = {
                static_cast<std::byte*>(program->dlpi_tls_data), segment.p_memsz};
          }
          return 1;
        },
        &own);
    return own;
  }();
  return found;
}

void fill_shared_memory() {
  const std::span<std::byte> memory = shared_memory();
  if (memory.empty()) return;  // under AddressSanitizer
  static const std::vector<uint64_t> words = [&] {
    std::vector<uint64_t> made(memory.size() / sizeof(uint64_t) + 2);
    std::generate(made.begin(), made.end(), std::ref(random_words));
    return made;
  }();
  // Another word for each variable each time.
  const size_t shift = random_words() % sizeof(uint64_t);
  std::memcpy(memory.data(), reinterpret_cast<const std::byte*>(words.data()) + shift,
              memory.size());
}

std::string place(const Location& location) {
  return std::string(location.file_name()) + ":" + std::to_string(location.line());
}

bool same_place(const Location& one, const Location& other) {
  return one.line() == other.line() && one.column() == other.column() &&
         std::strcmp(one.file_name(), other.file_name()) == 0;
}

std::string describe(const Thread& thread) {
  const std::string name = "thread " + std::to_string(thread.index);
  if (fibers[thread.index].ended()) return name + " has ended";
  if (thread.waits == Waits::kNot) return name + " runs";
  return name +
         (thread.waits == Waits::kForBarrier ? " waits at the barrier at "
                                             : " waits for its warp at ") +
         place(thread.location);
}

[[noreturn]] void fail(const std::string& what) {
  std::fprintf(stderr, "cuda_emulation: kernel %s, block %u: %s\n", kernel_name, blockIdx.x,
               what.c_str());
  std::_Exit(3);
}

void wait_for(Waits what) {
  current->waits = what;
  Thread* const self = current;
  fibers[self->index].pause();
}

// Lets the threads on that wait at a barrier, once all of the CTA do.
bool finish_barrier() {
  for (unsigned i = 0; i < running_threads; ++i) {
    if (threads[i].waits != Waits::kForBarrier) return false;
  }
  for (unsigned i = 0; i < running_threads; ++i) {
    if (!same_place(threads[i].location, threads[0].location)) {
      fail("divergent barriers: " + describe(threads[0]) + ", " + describe(threads[i]));
    }
    threads[i].waits = Waits::kNot;
  }
  return true;
}

// The value that `thread` receives from the lanes of its mask. ballot: the lanes with a value
// other than 0.
uint64_t combine(const uint64_t (&values)[kLanes], uint32_t ballot, const Thread& thread) {
  switch (thread.operation) {
    case WarpOperation::kShuffle:
      if ((thread.mask >> thread.lane & 1) == 0) {
        fail(describe(thread) + " and reads from lane " + std::to_string(thread.lane) +
             ", which is not in its mask");
      }
      return values[thread.lane];
    case WarpOperation::kAll:
      return ballot == thread.mask;
    default:
      return ballot;
  }
}

// The lane of `thread`'s warp, if it has come to the same operation; null if it is on its way.
Thread* arrived_lane(const Thread& thread, unsigned lane) {
  const unsigned index = thread.index / kLanes * kLanes + lane;
  if (index >= running_threads) {
    fail(describe(thread) + ", but lane " + std::to_string(lane) + " of its mask does not exist");
  }
  Thread& other = threads[index];
  if (fibers[index].ended()) {
    fail("a lane is missing from an operation of the warp: " + describe(thread) + ", " +
         describe(other));
  }
  if (other.waits != Waits::kForWarp) return nullptr;
  if (other.mask != thread.mask || other.operation != thread.operation ||
      !same_place(other.location, thread.location)) {
    fail("lanes of one mask meet different operations: " + describe(thread) + ", " +
         describe(other));
  }
  return &other;
}

// Completes the operation that `thread` waits for if all lanes of its mask have reached it.
void finish_warp_operation(const Thread& thread) {
  Thread* lanes[kLanes] = {};
  uint64_t values[kLanes] = {};
  uint32_t ballot = 0, turns = 0;
  for (unsigned lane = 0; lane < kLanes; ++lane) {
    if ((thread.mask >> lane & 1) == 0) continue;
    lanes[lane] = arrived_lane(thread, lane);
    if (lanes[lane] == nullptr) return;
    values[lane] = lanes[lane]->value;
    ballot |= uint32_t{values[lane] != 0} << lane;
    turns |= uint32_t{lanes[lane]->turn} << lane;
  }
  for (Thread* lane : lanes) {
    if (lane == nullptr) continue;
    lane->result = combine(values, ballot, *lane);
    lane->turns = turns;
    lane->waits = Waits::kNot;
  }
}

void run_thread(void* argument) {
  acquire(&start_order);
  (*static_cast<Thread*>(argument)->body)();
  release(&end_order);
}

void enter(Thread& thread) {
  current = &thread;
  threadIdx.x = thread.index;
}

[[noreturn]] void report_deadlock() {
  std::string states;
  Waits seen = Waits::kNot;
  bool ended = false;
  for (unsigned i = 0; i < running_threads; ++i) {
    const bool news = fibers[i].ended() ? !ended : threads[i].waits != seen;
    if (news) states += (states.empty() ? "" : ", ") + describe(threads[i]);
    ended = fibers[i].ended();
    seen = threads[i].waits;
  }
  fail("deadlock, barrier or warp divergence: " + states);
}

void run_block(const std::function<void()>& body) {
  for (unsigned i = 0; i < running_threads; ++i) {
    threads[i] = Thread{};
    threads[i].index = i;
    threads[i].body = &body;
  }
  release(&start_order);
  for (unsigned i = 0; i < running_threads; ++i) {
    enter(threads[i]);
    fibers[i].start(run_thread, &threads[i]);
  }
  while (true) {
    unsigned ended = 0;
    bool progress = finish_barrier();
    for (unsigned i = 0; i < running_threads; ++i) {
      if (fibers[i].ended()) {
        ++ended;
        continue;
      }
      if (threads[i].waits == Waits::kForWarp) finish_warp_operation(threads[i]);
      if (threads[i].waits != Waits::kNot) continue;
      enter(threads[i]);
      fibers[i].resume();
      progress = true;
    }
    if (ended == running_threads) break;
    if (!progress) report_deadlock();
  }
  acquire(&end_order);
}

}  // namespace

void run(const char* name, unsigned grid, unsigned block, const std::function<void()>& thread) {
  kernel_name = name;
  running_threads = block;
  gridDim.x = grid;
  blockDim.x = block;
  while (fibers.size() < block) {
    fibers.emplace_back();
    threads.emplace_back();
  }
  std::vector<unsigned> order(grid);
  std::iota(order.begin(), order.end(), 0u);
  std::shuffle(order.begin(), order.end(), random_words);
  for (const unsigned block_index : order) {
    blockIdx.x = block_index;
    fill_shared_memory();
    run_block(thread);
  }
}

namespace {

std::set<const void*>& loaded_kernels() {
  static std::set<const void*> kernels;
  return kernels;
}

}  // namespace

void load(const void* kernel) { loaded_kernels().insert(kernel); }

void refuse_unless_loaded(const char* name, const void* kernel) {
  if (!must_be_loaded || loaded_kernels().contains(kernel)) return;
  kernel_name = name;
  fail("launched without having been loaded before");
}

[[gnu::weak]] Translated translation_of(const char*, const void*, size_t) { return nullptr; }

void sync_threads(const Location& location) {
  const int number = ++current->barriers;
  if (number == skipped_barrier) return;
  current->location = location;
  release(&barrier_order[number % 2]);
  wait_for(Waits::kForBarrier);
  acquire(&barrier_order[number % 2]);
}

uint64_t warp_operation(WarpOperation operation, unsigned mask, uint64_t value, unsigned lane,
                        const Location& location) {
  Thread& self = *current;
  self.location = location;
  self.operation = operation;
  self.mask = mask;
  self.lane = lane;
  self.value = value;
  if ((mask >> (self.index % kLanes) & 1) == 0) {
    fail("thread " + std::to_string(self.index) + " is not in its own mask at " + place(location));
  }
  if (operation != WarpOperation::kSync) {
    wait_for(Waits::kForWarp);
    return self.result;
  }
  self.turn ^= 1;
  release(&self.order[self.turn]);
  wait_for(Waits::kForWarp);
  const unsigned first = self.index / kLanes * kLanes;
  for (unsigned other = 0; other < kLanes; ++other) {
    if ((mask >> other & 1) != 0) acquire(&threads[first + other].order[self.turns >> other & 1]);
  }
  return 0;
}

void check_alignment(const void* address, size_t bytes) {
  // Or the compiler would conclude from the type that all is well.
  asm volatile("" : "+r"(address));
  if (reinterpret_cast<uintptr_t>(address) % bytes == 0) return;
  char text[128];
  std::snprintf(text, sizeof(text), "misaligned address %p of an access of %zu bytes by thread %u",
                address, bytes, threadIdx.x);
  fail(text);
}

}  // namespace bagua::emulation
