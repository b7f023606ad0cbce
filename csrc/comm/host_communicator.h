// Tensors of a device on a transport that moves only host memory.
#pragma once

#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "comm/communicator.h"
#include "comm/device_stream.h"

namespace bagua {

// Copies what a call reads into host memory, lets another communicator move it, and copies what it
// wrote back: for ranks that share a GPU, which NCCL refuses, and to find out whether a fault is
// NCCL's. Host memory is pinned on CUDA, and used again by later calls.
//
// Contracts of Communicator, and:
// - The calling thread waits for the work that the current stream has been given before the call;
//   copies back are in that stream's order and are not waited for.
// - All tensors of a call are on one device. CPU tensors are copied as those of a device are.
// - Ownership: shares the inner communicator. Refusals and failures are the inner one's.
class HostCommunicator final : public Communicator {
 public:
  explicit HostCommunicator(std::shared_ptr<Communicator> inner);

  void all_reduce(at::Tensor& tensor, ReduceOp op) override;
  void all_gather(const at::Tensor& input, at::Tensor& output) override;
  int64_t messages_of_all_gather(const at::Tensor& output) const override {
    return inner_->messages_of_all_gather(output);
  }
  void all_to_all(const at::Tensor& input, at::Tensor& output) override;
  void broadcast(at::Tensor& tensor, int root) override;
  bool broadcasts_in_parts(const at::Tensor& tensor) const override {
    return inner_->broadcasts_in_parts(tensor);
  }
  using Communicator::exchange;
  void exchange(c10::ArrayRef<Send> sends, c10::ArrayRef<Recv> recvs,
                const OnReceived& on_received) override;
  void shorten_paths() override { inner_->shorten_paths(); }
  bool shares_memory() const override { return inner_->shares_memory(); }
  void abort(const std::string& reason) noexcept override;

 private:
  template <typename Move>
  void in_place(at::Tensor& tensor, Move move);
  template <typename Move>
  void from_input_to_output(const at::Tensor& input, at::Tensor& output, Move move);

  void reuse_memory();
  at::Tensor memory_like(const at::Tensor& tensor);
  at::Tensor copy_to_host(const at::Tensor& tensor);
  void copy_back(const at::Tensor& host, const at::Tensor& tensor);

  const std::shared_ptr<Communicator> inner_;
  std::vector<at::Tensor> memory_;  // bytes, by the tensor's place in a call; they only grow
  size_t taken_ = 0;                // used by the current call
  std::optional<StreamPoints> copied_back_;
};

}  // namespace bagua
