#include "comm/host_communicator.h"

#include <utility>

#include "base/check.h"
#include "comm/flat_copy.h"
#include "comm/host_memory.h"
#include "comm/tensor_checks.h"

namespace bagua {
namespace {

const std::shared_ptr<Communicator>& not_null(const std::shared_ptr<Communicator>& inner) {
  BAGUA_CHECK_ARG(inner, "HostCommunicator: there is no communicator to move host memory");
  return inner;
}

// All of them are on one device, which is returned; none where there are no tensors.
std::optional<at::Device> device_of(c10::ArrayRef<Send> sends, c10::ArrayRef<Recv> recvs) {
  std::optional<at::Device> device;
  const auto join = [&](const at::Tensor& tensor) {
    if (!device) device = tensor.device();
    BAGUA_CHECK(tensor.device() == *device, "exchange: tensors are on ", device->str(), " and ",
                tensor.device().str(), ", pass those of one device");
  };
  for (const Send& send : sends) join(send.tensor);
  for (const Recv& recv : recvs) join(recv.tensor);
  return device;
}

}  // namespace

HostCommunicator::HostCommunicator(std::shared_ptr<Communicator> inner)
    : Communicator(not_null(inner)->group()), inner_(std::move(inner)) {}

void HostCommunicator::all_reduce(at::Tensor& tensor, ReduceOp op) {
  check_all_reduce(tensor, op);
  in_place(tensor, [&](at::Tensor& host) { inner_->all_reduce(host, op); });
}

void HostCommunicator::broadcast(at::Tensor& tensor, int root) {
  check_broadcast(tensor, root, group());
  in_place(tensor, [&](at::Tensor& host) { inner_->broadcast(host, root); });
}

void HostCommunicator::all_gather(const at::Tensor& input, at::Tensor& output) {
  check_all_gather(input, output, group());
  from_input_to_output(
      input, output, [&](const at::Tensor& from, at::Tensor& to) { inner_->all_gather(from, to); });
}

void HostCommunicator::all_to_all(const at::Tensor& input, at::Tensor& output) {
  check_all_to_all(input, output, group());
  from_input_to_output(
      input, output, [&](const at::Tensor& from, at::Tensor& to) { inner_->all_to_all(from, to); });
}

void HostCommunicator::exchange(c10::ArrayRef<Send> sends, c10::ArrayRef<Recv> recvs,
                                const OnReceived& on_received) {
  check_exchange(sends, recvs, group());
  const std::optional<at::Device> device = device_of(sends, recvs);
  reuse_memory();
  std::vector<Send> host_sends;
  std::vector<Recv> host_recvs;
  for (const Send& send : sends) host_sends.push_back({copy_to_host(send.tensor), send.peer});
  for (const Recv& recv : recvs) host_recvs.push_back({memory_like(recv.tensor), recv.peer});
  if (device) wait_for_current_stream(*device);  // copies to host memory do not wait
  inner_->exchange(host_sends, host_recvs, [&](size_t message) {
    copy_back(host_recvs[message].tensor, recvs[message].tensor);
    on_received(message);
  });
}

void HostCommunicator::abort(const std::string& reason) noexcept { inner_->abort(reason); }

template <typename Move>
void HostCommunicator::in_place(at::Tensor& tensor, Move move) {
  reuse_memory();
  at::Tensor host = copy_to_host(tensor);
  wait_for_current_stream(tensor.device());
  move(host);
  copy_back(host, tensor);
}

template <typename Move>
void HostCommunicator::from_input_to_output(const at::Tensor& input, at::Tensor& output,
                                            Move move) {
  reuse_memory();
  const at::Tensor from = copy_to_host(input);
  at::Tensor to = memory_like(output);
  wait_for_current_stream(input.device());
  move(from, to);
  copy_back(to, output);
}

// The device may still read what the call before gave back, on whatever stream that was.
void HostCommunicator::reuse_memory() {
  if (copied_back_) copied_back_->synchronize();
  copied_back_.reset();
  taken_ = 0;
}

at::Tensor HostCommunicator::memory_like(const at::Tensor& tensor) {
  const int64_t bytes = static_cast<int64_t>(tensor.nbytes());
  if (taken_ == memory_.size()) memory_.emplace_back();
  at::Tensor& memory = memory_[taken_++];
  if (!memory.defined() || memory.numel() < bytes) {
    memory = host_memory({bytes}, at::kByte, tensor.device());
  }
  return memory.narrow(0, 0, bytes).view(tensor.scalar_type());
}

at::Tensor HostCommunicator::copy_to_host(const at::Tensor& tensor) {
  at::Tensor host = memory_like(tensor);
  host.copy_(flat(tensor), /*non_blocking=*/true);
  return host;
}

void HostCommunicator::copy_back(const at::Tensor& host, const at::Tensor& tensor) {
  flat(tensor).copy_(host, /*non_blocking=*/true);
  copied_back_.emplace(tensor.device()).mark_current_stream();
}

}  // namespace bagua
