// Calls of every kind over shared memory.
#pragma once

#include <memory>
#include <string>
#include <vector>

#include <ATen/ops/empty.h>

#include "comm/refusal.h"
#include "comm/shm/in_place.h"
#include "comm/shm/shared_memory_communicator.h"
#include "stress/world.h"

namespace bagua::stress {

// Small integers, so that sums are exact.
inline float number(int rank, int call, int64_t i) {
  return static_cast<float>((i + 3 * rank + call) % 17);
}

inline at::Tensor numbers(int rank, int call, int64_t numel) {
  at::Tensor tensor = at::empty({numel});
  float* values = tensor.data_ptr<float>();
  for (int64_t i = 0; i < numel; ++i) values[i] = number(rank, call, i);
  return tensor;
}

inline float sum_of_numbers(int ranks, int call, int64_t i) {
  float sum = 0;
  for (int rank = 0; rank < ranks; ++rank) sum += number(rank, call, i);
  return sum;
}

inline void expect_value(const at::Tensor& tensor, int64_t at, float expected, const char* call) {
  const float found = tensor.data_ptr<float>()[at];
  expect(found == expected, call, ": element ", at, " is ", found, " instead of ", expected);
}

// One call of a random kind, the same on all ranks, and a look at all of its results.
inline void call_and_check(Communicator& comm, int call, int kind, int64_t numel) {
  const auto [rank, size] = comm.group();
  const auto value = [&](int of, int64_t i) { return number(of, call, i); };
  at::Tensor mine = numbers(rank, call, numel);
  if (kind == 0) {
    comm.all_reduce(mine, ReduceOp::kSum);
    for (int64_t i = 0; i < numel; ++i) {
      expect_value(mine, i, sum_of_numbers(size, call, i), "all_reduce");
    }
  } else if (kind == 1) {
    at::Tensor all = at::empty({numel * size});
    comm.all_gather(mine, all);
    for (int64_t i = 0; i < numel * size; ++i) {
      expect_value(all, i, value(static_cast<int>(i / numel), i % numel), "all_gather");
    }
  } else if (kind == 2) {
    const int root = call % size;
    comm.broadcast(mine, root);
    for (int64_t i = 0; i < numel; ++i) expect_value(mine, i, value(root, i), "broadcast");
  } else {
    at::Tensor left = at::empty({numel}), right = at::empty({numel});
    const int before = (rank + size - 1) % size, after = (rank + 1) % size;
    comm.exchange({{mine, after}, {mine, before}}, {{left, before}, {right, after}});
    for (int64_t i = 0; i < numel; ++i) {
      expect_value(left, i, value(before, i), "exchange");
      expect_value(right, i, value(after, i), "exchange");
    }
  }
}

// All ranks make the same random calls; one of them ends that, by an abort, by leaving, or not.
inline void shared_memory_carries_every_call(Random& random, const Delays& delays) {
  enum class End { kNone, kAbort, kLeave };
  const World world(random, 2, kPatient, {}, delays);
  const auto end = static_cast<End>(between(random, 0, 2));
  const int ends = between(random, 0, world.ranks - 1);
  const int calls = between(random, 1, 12);
  const uint64_t seed = random();
  const milliseconds delay{between(random, 0, 5)};
  const auto place =
      std::make_shared<MeetingPlace>(MeetingPlace::Kind::kSharedMemory, world.ranks, kPatient);
  const auto endings = run_ranks(world, [&](int rank) {
    Random own(seed);  // the same calls on all ranks
    const auto comm = world.connect(place, rank);
    std::thread aborter([&, aborts = end == End::kAbort && rank == ends] {
      std::this_thread::sleep_for(delay);
      if (aborts) comm->abort("the reason");
    });
    try {
      const int more = end == End::kNone || (end == End::kLeave && rank == ends) ? 0 : 100000;
      for (int call = 0; call < calls + more; ++call) {
        const int kind = between(own, 0, 3);
        const int most = between(own, 0, 9) == 0 ? 500000 : 3000;
        call_and_check(*comm, call, kind, between(own, 1, most));
      }
    } catch (...) {
      aborter.join();
      throw;
    }
    aborter.join();
  });
  for (int rank = 0; rank < world.ranks; ++rank) {
    const bool goes_on = end == End::kNone || (end == End::kLeave && rank == ends);
    expect(endings[rank].error.empty() == goes_on, "rank ", rank, ": '", endings[rank].error, "'");
    expect(!endings[rank].timed_out, "rank ", rank, " has waited: ", endings[rank].error);
  }
}

// A bucket in place, call after call, on memory that the ranks map once.
inline void buckets_are_reduced_in_place(Random& random, const Delays& delays) {
  const World world(random, 2, kPatient, {}, delays);
  const int64_t numel = between(random, 1, between(random, 0, 3) == 0 ? 600000 : 3000);
  const int calls = between(random, 1, 12);
  SharedGroup shared{.bells = make_bells(world.ranks), .memory = {}, .links = {}};
  shared.links.resize(world.ranks);
  std::vector<at::Tensor> buckets;
  InPlaceValues values{.of_rank = {}, .numel = numel, .dtype = at::kFloat};
  for (int rank = 0; rank < world.ranks; ++rank) {
    shared.memory.push_back(make_rank_memory(world.ranks));
    buckets.push_back(at::empty({numel}));
    values.of_rank.push_back(static_cast<std::byte*>(buckets[rank].data_ptr()));
  }
  const auto endings = run_ranks(world, [&](int rank) {
    const Group group{rank, world.ranks};
    const Refusal refusal(group);
    const PeerWaits waits(group, shared, refusal, kPatient);
    Meetings meetings(waits, shared);
    for (int call = 0; call < calls; ++call) {
      buckets[rank].copy_(numbers(rank, call, numel));
      world.point();
      const CallSite site = CallSite::of("all_reduce", buckets[rank]);
      meetings.describe(site, SharedCall::kReduceInPlace, ReduceOp::kSum, 1);
      reduce_in_place(meetings, site, values, ReduceOp::kSum);
      for (int64_t i = 0; i < numel; ++i) {
        expect_value(buckets[rank], i, sum_of_numbers(world.ranks, call, i), "all_reduce in place");
      }
    }
  });
  for (const Ending& ending : endings) expect(ending.error.empty(), ending.error);
}

}  // namespace bagua::stress
