// A transport of host memory that looks whether the device is through with what it is given.
#pragma once

#include <vector>

#include "comm/communicator.h"
#include "device_streams/loopback_communicator.h"
#include "fake_device/fake_device.h"

namespace bagua::fake {

// What LoopbackCommunicator does, with CPU tensors. Throws Error where a stream of `streams` may
// still read or write host memory when the transport is called.
class HostMemoryCommunicator final : public Communicator {
 public:
  HostMemoryCommunicator(int size, std::vector<int> streams)
      : Communicator({0, size}), streams_(std::move(streams)), loopback_(size) {}

  void all_reduce(at::Tensor& tensor, ReduceOp op) override {
    check({tensor});
    loopback_.all_reduce(tensor, op);
  }
  void all_gather(const at::Tensor& input, at::Tensor& output) override {
    check({input, output});
    loopback_.all_gather(input, output);
  }
  void all_to_all(const at::Tensor& input, at::Tensor& output) override {
    check({input, output});
    loopback_.all_to_all(input, output);
  }
  void broadcast(at::Tensor& tensor, int root) override {
    check({tensor});
    loopback_.broadcast(tensor, root);
  }
  using Communicator::exchange;
  void exchange(c10::ArrayRef<Send> sends, c10::ArrayRef<Recv> recvs,
                const OnReceived& on_received) override {
    for (const Send& send : sends) check({send.tensor});
    for (const Recv& recv : recvs) check({recv.tensor});
    if (sends.empty()) return;  // its receives hold what the memory held
    loopback_.exchange(sends, recvs, on_received);
  }
  void abort(const std::string&) noexcept override {}

 private:
  void check(const std::vector<at::Tensor>& tensors) const {
    for (const at::Tensor& tensor : tensors) {
      BAGUA_CHECK(tensor.is_cpu(), "the transport of host memory was given ",
                  tensor.device().str());
    }
    for (const int stream : streams_) {
      BAGUA_CHECK(Device::instance().has_copied_host_memory(stream),
                  "host memory is used while stream ", stream, " may still copy from or to it");
    }
  }

  const std::vector<int> streams_;
  LoopbackCommunicator loopback_;
};

}  // namespace bagua::fake
