// Delays at random points of a schedule, so that threads meet in orders which they seldom would.
#pragma once

#include <atomic>
#include <chrono>
#include <cstdint>
#include <functional>
#include <memory>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include <torch/csrc/distributed/c10d/HashStore.hpp>

#include "base/mixed_bits.h"
#include "comm/communicator.h"

namespace bagua::stress {

// Thread safety: all methods; they order nothing between threads, or they would hide races.
class Turbulence {
 public:
  // One point in `calm` is not a delay; 0: no delays at all.
  Turbulence(uint64_t seed, uint64_t calm) : seed_(seed), calm_(calm) {}

  // Where another thread may well go first: yields or sleeps, or does nothing.
  void point() {
    const int64_t number = points_.fetch_add(1, std::memory_order_relaxed);
    if (calm_ == 0) return;
    const uint64_t bits = mixed_bits(seed_ + 0x9e3779b97f4a7c15 * static_cast<uint64_t>(number));
    if (bits % calm_ != 0) return;
    switch ((bits >> 8) % 8) {
      case 0:
        return std::this_thread::sleep_for(std::chrono::microseconds((bits >> 16) % 3000));
      case 1:
      case 2:
        return std::this_thread::sleep_for(std::chrono::microseconds((bits >> 16) % 200));
      default:
        for (uint64_t i = (bits >> 16) % 4; i > 0; --i) std::this_thread::yield();
    }
  }

  // How many points have been passed, by all threads together.
  int64_t passed() const { return points_.load(std::memory_order_relaxed); }

 private:
  const uint64_t seed_;
  const uint64_t calm_;
  std::atomic<int64_t> points_{0};
};

// A communicator with points before and after each call.
class TurbulentCommunicator final : public Communicator {
 public:
  TurbulentCommunicator(std::unique_ptr<Communicator> inner, std::shared_ptr<Turbulence> turbulence)
      : Communicator(inner->group()),
        inner_(std::move(inner)),
        turbulence_(std::move(turbulence)) {}

  void all_reduce(at::Tensor& tensor, ReduceOp op) override {
    between_points([&] { inner_->all_reduce(tensor, op); });
  }
  void all_gather(const at::Tensor& input, at::Tensor& output) override {
    between_points([&] { inner_->all_gather(input, output); });
  }
  void all_to_all(const at::Tensor& input, at::Tensor& output) override {
    between_points([&] { inner_->all_to_all(input, output); });
  }
  void broadcast(at::Tensor& tensor, int root) override {
    between_points([&] { inner_->broadcast(tensor, root); });
  }
  using Communicator::exchange;
  void exchange(c10::ArrayRef<Send> sends, c10::ArrayRef<Recv> recvs,
                const OnReceived& on_received) override {
    between_points([&] { inner_->exchange(sends, recvs, on_received); });
  }
  void check() override { inner_->check(); }
  void abort(const std::string& reason) noexcept override {
    between_points([&] { inner_->abort(reason); });
  }

 private:
  template <typename Call>
  void between_points(Call call) {
    turbulence_->point();
    call();
    turbulence_->point();
  }

  const std::unique_ptr<Communicator> inner_;
  const std::shared_ptr<Turbulence> turbulence_;
};

// A store with a point before each question that the failure board asks.
class TurbulentStore final : public c10d::HashStore {
 public:
  explicit TurbulentStore(std::shared_ptr<Turbulence> turbulence)
      : turbulence_(std::move(turbulence)) {}

  using c10d::HashStore::compareSet;
  std::vector<uint8_t> compareSet(const std::string& key, const std::vector<uint8_t>& expected,
                                  const std::vector<uint8_t>& desired) override {
    turbulence_->point();
    return c10d::HashStore::compareSet(key, expected, desired);
  }
  bool check(const std::vector<std::string>& keys) override {
    turbulence_->point();
    return c10d::HashStore::check(keys);
  }

 private:
  const std::shared_ptr<Turbulence> turbulence_;
};

}  // namespace bagua::stress
