// NcclCommunicator under the sanitizers: thread ranks over the fake NCCL and a fake device, whose
// kernels, watchdogs, aborts from other threads and ends meet at random moments.
//
//   stress_nccl [seed] [seconds]
#include <algorithm>
#include <atomic>
#include <chrono>
#include <cstdio>
#include <cstdlib>
#include <random>
#include <thread>
#include <vector>

#include <ATen/core/Tensor.h>
#include <dlfcn.h>
#include <torch/csrc/distributed/c10d/HashStore.hpp>
#include <unistd.h>

#include "base/check.h"
#include "comm/nccl/nccl_communicator.h"
#include "comm/nccl/nccl_library.h"
#include "fake_device/fake_cuda_guard.h"

namespace bagua {
namespace {

using std::chrono::milliseconds;
using Random = std::mt19937_64;
using Library = std::shared_ptr<const NcclLibrary>;

int between(Random& random, int low, int high) {
  return std::uniform_int_distribution<int>(low, high)(random);
}

enum class Fate { kGood, kAborted, kHeld };

// What happens in a round, the same for all its ranks.
struct Round {
  Fate fate;
  int ranks;
  int calls;
  int pause_us;
};

// Memory of a device, which is freed behind the kernels that were given before, whatever a call on
// the host throws.
struct DeviceMemory {
  static constexpr int64_t kNumel = 257;
  std::vector<float> sent = std::vector<float>(kNumel), received = std::vector<float>(kNumel);
};

void await_kernels() {
  void* const stream = FakeGuard().getStreamNativeHandle(FakeGuard().getStream(kDevice));
  const uint64_t given = followed.given(stream);
  while (!followed.have_ended(stream, given)) std::this_thread::yield();
}

void call_and_check(NcclCommunicator& comm, DeviceMemory& memory, float expected) {
  constexpr int64_t kNumel = DeviceMemory::kNumel;
  std::fill(memory.sent.begin(), memory.sent.end(), 1.0f);
  at::Tensor tensor(tensor_over(memory.sent.data(), kNumel));
  at::Tensor target(tensor_over(memory.received.data(), kNumel));
  comm.all_reduce(tensor, ReduceOp::kSum);
  const auto [rank, size] = comm.group();
  comm.exchange({Send{tensor, (rank + 1) % size}}, {Recv{target, (rank + size - 1) % size}});
  await_kernels();
  comm.check();  // or the kernels have ended by an abort
  BAGUA_CHECK(memory.received.back() == expected, "got ", memory.received.back(), " instead of ",
              expected);
}

// Failures are expected, wrong results are not: those throw before any failure.
void run_rank(const Library& library, const c10::intrusive_ptr<c10d::HashStore>& store,
              const Round& round, int rank) {
  const milliseconds timeout{round.fate == Fate::kHeld ? 60 : 20000};
  FakeGuard().setDevice(kDevice);
  // A stream of a separate GPU, without kernels of rounds before: held events are those behind a
  // kernel, so that the first call of a round begins, and times out.
  static std::atomic<int> gpus{0};
  current_stream = 8 * ++gpus;
  DeviceMemory memory;
  std::shared_ptr<NcclCommunicator> comm, half;
  std::thread other;
  try {
    comm = make_nccl_communicator({library, store, {rank, round.ranks}, kDevice, timeout});
    std::vector<int> like_me;
    for (int other_rank = rank % 2; other_rank < round.ranks; other_rank += 2) {
      like_me.push_back(other_rank);
    }
    half = comm->split(like_me);
    if (round.fate == Fate::kAborted) {
      other = std::thread([&] {
        std::this_thread::sleep_for(std::chrono::microseconds(round.pause_us));
        comm->abort("asked for");
      });
    }
    for (int call = 0; call < round.calls; ++call) {
      call_and_check(*comm, memory, static_cast<float>(round.ranks));
    }
  } catch (const Error& error) {
    if (round.fate == Fate::kGood) {
      std::fprintf(stderr, "rank %d: %s\n", rank, error.what());
      std::abort();
    }
  }
  if (other.joinable()) other.join();
  comm.reset();
  half.reset();
  await_kernels();
}

void run_round(const Library& library, Random& random) {
  const Round round{static_cast<Fate>(between(random, 0, 2)), between(random, 2, 4),
                    between(random, 1, 30), between(random, 0, 3000)};
  holds = round.fate == Fate::kHeld;
  auto store = c10::make_intrusive<c10d::HashStore>();
  std::vector<std::thread> ranks;
  for (int rank = 0; rank < round.ranks; ++rank) {
    ranks.emplace_back([&, rank] { run_rank(library, store, round, rank); });
  }
  for (std::thread& rank : ranks) rank.join();
}

int run_all(uint64_t seed, int seconds) {
  Random random(seed);
  const Library library = open_nccl_library(FAKE_NCCL);
  void* const fake = dlopen(FAKE_NCCL, RTLD_NOW | RTLD_NOLOAD);
  followed = {
      reinterpret_cast<decltype(Followed::given)>(dlsym(fake, "fake_nccl_given")),
      reinterpret_cast<decltype(Followed::have_ended)>(dlsym(fake, "fake_nccl_have_ended"))};
  const auto end = std::chrono::steady_clock::now() + std::chrono::seconds(seconds);
  int rounds = 0;
  for (; std::chrono::steady_clock::now() < end; ++rounds) run_round(library, random);
  std::printf("stress_nccl %llu: %d rounds\n", static_cast<unsigned long long>(seed), rounds);
  return 0;
}

}  // namespace
}  // namespace bagua

int main(int count, char** words) {
  const uint64_t seed = count > 1 ? std::strtoull(words[1], nullptr, 10) : std::random_device{}();
  const int seconds = count > 2 ? std::atoi(words[2]) : 10;
  alarm(seconds + 120);  // a hang ends the program
  return bagua::run_all(seed, seconds);
}
