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

#include <ATen/ops/rand.h>
#include <ATen/record_function.h>

#include "device_streams/subjects.h"
#include "device_work/uncounted_communicator.h"
#include "op/async_average.h"

namespace bagua::fake {
namespace {

// Runs a round over a rank's bucket.
using RunRound = std::function<void(int64_t round)>;

struct Case {
  std::string name;
  std::function<RunRound(const Place&, const at::Tensor& flat)> make;
};

RunRound asynchronous_average(const Place& place, const at::Tensor& flat) {
  auto op = std::make_shared<AsyncAverage>(place.communicator, std::vector{flat},
                                           std::make_shared<WeightGate>());
  return [op](int64_t) { op->run(false); };
}

std::vector<Case> cases() {
  std::vector<Case> all{{"async_average", asynchronous_average}};
  for (const Subject& subject : subjects()) {
    if (subject.work.empty()) continue;
    const auto make = [make_op = subject.make](const Place& place, at::Tensor flat) -> RunRound {
      return [op = make_op(place), flat](int64_t round) mutable {
        op->run(flat, {.number = round, .grad_scale = 1, .bucket = "b"});
      };
    };
    all.push_back({subject.work, make});
  }
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
    const RunRound run = subject.make({comm, kFake, numel}, flat);
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
