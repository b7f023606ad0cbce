// A communicator whose own work is not counted as its caller's.
#pragma once

#include <memory>
#include <utility>

#include "comm/communicator.h"
#include "fake_device/fake_device.h"

namespace bagua::fake {

// Forwards every call and counts it as one transfer: copies between ranks that are threads, and
// their waits for each other, stand for the work of a network.
class UncountedCommunicator final : public Communicator {
 public:
  explicit UncountedCommunicator(std::shared_ptr<Communicator> inner)
      : Communicator(inner->group()), inner_(std::move(inner)) {}

  void all_reduce(at::Tensor& tensor, ReduceOp op) override {
    uncounted([&] { inner_->all_reduce(tensor, op); });
  }
  void all_gather(const at::Tensor& input, at::Tensor& output) override {
    uncounted([&] { inner_->all_gather(input, output); });
  }
  void all_to_all(const at::Tensor& input, at::Tensor& output) override {
    uncounted([&] { inner_->all_to_all(input, output); });
  }
  void broadcast(at::Tensor& tensor, int root) override {
    uncounted([&] { inner_->broadcast(tensor, root); });
  }
  using Communicator::exchange;
  void exchange(c10::ArrayRef<Send> sends, c10::ArrayRef<Recv> recvs,
                const OnReceived& on_received) override {
    Work* const of_caller = counted;
    uncounted([&] {
      inner_->exchange(sends, recvs, [&](size_t message) {
        counted = of_caller;
        on_received(message);
        counted = nullptr;
      });
    });
  }
  void check() override { inner_->check(); }
  void abort(const std::string& reason) noexcept override { inner_->abort(reason); }

 private:
  template <typename Call>
  static void uncounted(Call call) {
    count({.transfers = 1});
    Work* const of_caller = std::exchange(counted, nullptr);
    call();
    counted = of_caller;
  }

  const std::shared_ptr<Communicator> inner_;
};

}  // namespace bagua::fake
