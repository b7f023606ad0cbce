// Counts the work that ops give to a device: kernels, bytes, transfers and waits of one rank in one
// round, on the fake device. Included by device_streams.cpp; tests/support/programs/device_work.py
// runs it.
#pragma once

#include <functional>
#include <iostream>
#include <latch>
#include <memory>
#include <string>
#include <string_view>
#include <thread>
#include <vector>

#include <ATen/ops/full.h>
#include <ATen/ops/rand.h>
#include <ATen/record_function.h>

#include "device_streams/subjects.h"
#include "device_work/uncounted_communicator.h"
#include "op/async_average.h"

namespace bagua::fake {
namespace {

constexpr int64_t kSlots = 50;
constexpr int64_t kSparseShare = 100;  // one element of so many is sent

at::Tensor counter() { return at::zeros({1}, at::kLong); }

// A rank's bucket and what runs a round over it.
struct Rank {
  std::shared_ptr<Communicator> communicator;
  at::Tensor flat;

  Group group() const { return communicator->group(); }
};
using RunRound = std::function<void(int64_t round)>;

struct Case {
  std::string name;
  std::function<RunRound(Rank)> make;
};

// Makes RunRound of a function that makes a bucket's op.
template <typename Make>
Case op_case(std::string name, Make make) {
  return {std::move(name), [make](Rank rank) -> RunRound {
            return [op = make(rank), flat = rank.flat](int64_t round) mutable {
              op->run(flat, {.number = round, .grad_scale = 1, .bucket = "b"});
            };
          }};
}

std::shared_ptr<NeighborAverage> complete_graph(const Rank& rank) {
  std::vector<MixingTerm> terms;
  const auto [own, size] = rank.group();
  for (int other = 0; other < size; ++other) {
    if (other != own) terms.push_back({other, 1.0 / size});
  }
  return std::make_shared<NeighborAverage>(rank.communicator, 1.0 / size, terms,
                                           std::make_shared<Scratch>());
}

std::shared_ptr<UpdateMomentum> momentum_of_slots(const Rank& rank) {
  std::vector<SlotMomentum> slots;
  const int64_t numel = rank.flat.numel() / kSlots;
  for (int64_t slot = 0; slot < kSlots; ++slot) {
    slots.push_back({zeros_on(kFake, numel), slot * numel, {1}});
  }
  return std::make_shared<UpdateMomentum>(std::move(slots), at::full({kSlots}, 0.9, at::kDouble),
                                          std::make_shared<Scratch>());
}

// Blocks of two matrices and two vectors, as of a transformer: matrices of one shape are at equal
// distances.
std::shared_ptr<LowRank> low_rank_of_blocks(const Rank& rank) {
  constexpr int64_t kMatrix = 40000, kFirstVector = 200, kSecondVector = 100, kRank = 2;
  std::vector<LowRankMatrix> matrices;
  int64_t at = 0, queries = 0;
  while (at + 2 * kMatrix + kFirstVector + kSecondVector <= rank.flat.numel()) {
    matrices.push_back({at, 200, 200, kRank});
    matrices.push_back({at + kMatrix + kFirstVector, 100, 400, kRank});
    queries += kRank * (200 + 400);
    at += 2 * kMatrix + kFirstVector + kSecondVector;
  }
  return std::make_shared<LowRank>(
      rank.communicator, std::make_shared<Scratch>(), rank.flat.numel(), matrices,
      LowRankOptions{.warm_start = true,
                     .error_feedback = true,
                     .seed = 7,
                     .kernels = std::make_shared<NotingLowRank>()},
      memory({zeros_on(kFake, rank.flat.numel()), zeros_on(kFake, queries), counter()}));
}

RunRound asynchronous_average(const Rank& rank) {
  auto op = std::make_shared<AsyncAverage>(rank.communicator, std::vector{rank.flat},
                                           std::make_shared<WeightGate>());
  return [op](int64_t) { op->run(false); };
}

std::vector<Case> cases() {
  std::vector<Case> all;
  all.push_back(op_case("all_reduce", [](const Rank& rank) {
    return std::make_shared<AllReduce>(rank.communicator, ReduceOp::kAvg);
  }));
  for (const std::string& codec : codec_names()) {
    all.push_back(op_case("compressed_all_reduce " + codec, [codec](const Rank& rank) {
      return std::make_shared<CompressedAllReduce>(rank.communicator,
                                                   std::make_shared<NotingCodec>(codec),
                                                   std::make_shared<Scratch>(), ReduceOp::kAvg);
    }));
  }
  for (const std::string codec : {"minmax_uint8", "int4_block"}) {
    const std::string name = "compressed_all_reduce " + codec + " with residuals";
    all.push_back(op_case(name, [codec](const Rank& rank) {
      const int64_t numel = rank.flat.numel();
      const auto residuals =
          memory({zeros_on(kFake, numel), counter(), zeros_on(kFake, numel / rank.group().size)});
      return std::make_shared<CompressedAllReduce>(
          rank.communicator, std::make_shared<NotingCodec>(codec), std::make_shared<Scratch>(),
          ReduceOp::kAvg, Checksum::kOff, TwoResiduals{.memory = residuals, .padding = 0});
    }));
  }
  for (const std::string& codec : codec_names()) {
    all.push_back(op_case("compressed_gossip " + codec, [codec](const Rank& rank) {
      const int64_t numel = rank.flat.numel();
      const Replicas replicas{zeros_on(kFake, numel), zeros_on(kFake, numel),
                              zeros_on(kFake, numel)};
      return std::make_shared<CompressedGossip>(
          rank.communicator, std::make_shared<NotingCodec>(codec), std::make_shared<Scratch>(),
          replicas, MixingWeights{1.0 / 3, 1.0 / 3});
    }));
  }
  all.push_back(op_case("gossip", [](const Rank& rank) {
    return std::make_shared<Gossip>(rank.communicator, counter(),
                                    std::vector<int>(rank.group().size, 1),
                                    std::make_shared<Scratch>());
  }));
  all.push_back(op_case("neighbor_average", complete_graph));
  all.push_back({"async_average", asynchronous_average});
  all.push_back(op_case("update_momentum", momentum_of_slots));
  all.push_back(op_case("low_rank", low_rank_of_blocks));
  all.push_back(op_case("sparse", [](const Rank& rank) {
    const int64_t numel = rank.flat.numel();
    return std::make_shared<Sparse>(
        rank.communicator, std::make_shared<Scratch>(), numel, numel / kSparseShare,
        memory({zeros_on(kFake, numel), counter()}), noting_sparse_options());
  }));
  return all;
}

// The work of one rank: all of it, and what CompressedAllReduce does with its own part.
struct RankWork {
  Work all;
  Work own_part;
};

thread_local RankWork work_of_thread;

struct PartBegin : at::ObserverContext {
  Work before;
};

std::unique_ptr<at::ObserverContext> begin_part(const at::RecordFunction& function) {
  if (std::string_view(function.name()) != "bagua::reduce") return nullptr;
  auto begin = std::make_unique<PartBegin>();
  begin->before = work_of_thread.all;
  return begin;
}

void end_part(const at::RecordFunction&, at::ObserverContext* begin) {
  if (begin) {
    work_of_thread.own_part += work_of_thread.all - static_cast<PartBegin*>(begin)->before;
  }
}

// Two rounds on ranks that are threads, of which the second is counted, on rank 0. A rank counts
// from where all have ended the first, and the device is behind from there.
RankWork count(const Case& subject, int ranks, int64_t numel) {
  const auto hub = std::make_shared<ThreadHub>(ranks, std::chrono::seconds(60));
  std::vector<RankWork> works(ranks);
  std::latch ended(ranks), behind(1);
  const auto run_rank = [&](int rank) {
    const at::NoGradGuard no_grad;
    const c10::StreamGuard guard(Guard::stream(20 + rank));
    const auto comm =
        std::make_shared<UncountedCommunicator>(std::make_shared<ThreadCommunicator>(hub, rank));
    const at::Tensor flat = at::rand({numel}).to(kFake);
    const RunRound run = subject.make({comm, flat});
    run(1);
    ended.arrive_and_wait();
    if (rank == 0) {
      Device::instance().fall_behind();
      behind.count_down();
    }
    behind.wait();
    work_of_thread = {};
    const auto part = at::addThreadLocalCallback(
        at::RecordFunctionCallback(&begin_part, &end_part).scopes({at::RecordScope::FUNCTION}));
    counted = &work_of_thread.all;
    run(2);
    counted = nullptr;
    at::removeCallback(part);
    works[rank] = work_of_thread;
  };
  std::vector<std::thread> threads;
  for (int rank = 0; rank < ranks; ++rank) {
    threads.emplace_back([&, rank] {
      try {
        run_rank(rank);
      } catch (const std::exception& error) {
        std::cerr << error.what() << std::endl;
        std::_Exit(1);  // the others wait for this rank
      }
    });
  }
  for (std::thread& thread : threads) thread.join();
  Device::instance().forget();
  return works.front();
}

void print(const std::string& name, int ranks, const Work& work, double numel) {
  std::cout << "{\"op\": \"" << name << "\", \"ranks\": " << ranks
            << ", \"launches\": " << work.launches << ", \"transfers\": " << work.transfers
            << ", \"waits\": " << work.host_waits
            << ", \"read\": " << static_cast<double>(work.bytes_read) / numel
            << ", \"written\": " << static_cast<double>(work.bytes_written) / numel << "}"
            << std::endl;
}

}  // namespace
}  // namespace bagua::fake

// Prints a line of JSON for each op of `ranks` ranks and a bucket of `numel` f32; bytes are per
// element of the bucket, or of the rank's own part.
extern "C" void device_work(int ranks, int64_t numel) {
  using namespace bagua::fake;
  for (const Case& subject : cases()) {
    const RankWork work = count(subject, ranks, numel);
    print(subject.name, ranks, work.all, static_cast<double>(numel));
    if (work.own_part.launches > 0) {
      print(subject.name + ", own part", ranks, work.own_part, static_cast<double>(numel) / ranks);
    }
  }
}
