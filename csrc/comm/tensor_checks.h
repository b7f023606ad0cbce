// Argument checks of all communicators, so that all refuse the same calls with the same errors. All
// throw Error; nothing has been sent when they do.
#pragma once

#include <algorithm>
#include <bit>
#include <string>
#include <utility>
#include <vector>

#include <ATen/core/Tensor.h>
#include <c10/core/ScalarType.h>

#include "base/check.h"
#include "comm/communicator.h"

namespace bagua {

// "float32", as Python says it.
inline std::string dtype_text(at::ScalarType type) {
  return std::string(c10::getDtypeNames(type).first);
}

constexpr const char* reduce_op_text(ReduceOp op) {
  switch (op) {
    case ReduceOp::kSum:
      return "sum";
    case ReduceOp::kAvg:
      return "avg";
    case ReduceOp::kMin:
      return "min";
    case ReduceOp::kMax:
      return "max";
  }
  return "unknown";
}

inline void check_dense(const char* call, const at::Tensor& tensor) {
  BAGUA_CHECK(tensor.defined(), call, ": the tensor is undefined");
  BAGUA_CHECK(tensor.layout() == at::kStrided && tensor.is_contiguous(), call,
              ": the tensor must be dense and contiguous, pass .contiguous() memory");
}

inline void check_peer(const char* call, int peer, Group group) {
  BAGUA_CHECK(peer >= 0 && peer < group.size, call, ": rank ", peer, " is outside a group of size ",
              group.size);
}

inline void check_all_reduce(const at::Tensor& tensor, ReduceOp op) {
  check_dense("all_reduce", tensor);
  BAGUA_CHECK(op != ReduceOp::kAvg || tensor.is_floating_point(),
              "all_reduce: avg needs a floating dtype, got ", dtype_text(tensor.scalar_type()));
  BAGUA_CHECK(op != ReduceOp::kSum || tensor.scalar_type() != at::kBool,
              "all_reduce: bool has no sum, use max (any) or min (all)");
}

// NCCL averages by a factor of 1 / size in the tensor's dtype. In 16 bits it is rounded so much
// that the mean of 3, 5, 6 or 7 ranks is off by up to 0.2 %, unlike that of a power of two.
inline bool nccl_averages_well(const at::Tensor& tensor, int size) {
  return tensor.element_size() > 2 || std::has_single_bit(static_cast<unsigned>(size));
}

inline void check_same_dtype(const char* call, const at::Tensor& input, const at::Tensor& output) {
  check_dense(call, input);
  check_dense(call, output);
  BAGUA_CHECK(input.scalar_type() == output.scalar_type() && input.device() == output.device(),
              call, ": input is ", dtype_text(input.scalar_type()), " on ", input.device().str(),
              ", output is ", dtype_text(output.scalar_type()), " on ", output.device().str());
}

inline void check_all_gather(const at::Tensor& input, const at::Tensor& output, Group group) {
  check_same_dtype("all_gather", input, output);
  BAGUA_CHECK(output.numel() == input.numel() * group.size, "all_gather: an input of ",
              input.numel(), " elements on ", group.size, " ranks needs an output of ",
              input.numel() * group.size, ", got ", output.numel());
}

inline void check_all_to_all(const at::Tensor& input, const at::Tensor& output, Group group) {
  check_same_dtype("all_to_all", input, output);
  BAGUA_CHECK(input.numel() == output.numel() && input.numel() % group.size == 0,
              "all_to_all: input and output must have equal numel, divisible by ", group.size,
              "; got ", input.numel(), " and ", output.numel());
}

inline void check_broadcast(const at::Tensor& tensor, int root, Group group) {
  check_dense("broadcast", tensor);
  check_peer("broadcast", root, group);
}

// The rank's messages to itself: the i-th send goes to the i-th receive.
inline std::vector<std::pair<at::Tensor, at::Tensor>> own_messages(c10::ArrayRef<Send> sends,
                                                                   c10::ArrayRef<Recv> recvs,
                                                                   int rank) {
  std::vector<std::pair<at::Tensor, at::Tensor>> messages;
  auto recv = recvs.begin();
  const auto is_own = [rank](const auto& half) { return half.peer == rank; };
  for (const Send& send : sends) {
    if (send.peer != rank) continue;
    recv = std::find_if(recv, recvs.end(), is_own);
    BAGUA_CHECK(recv != recvs.end(), "exchange: a send to the rank itself has no receive");
    check_same_dtype("exchange", send.tensor, recv->tensor);
    BAGUA_CHECK(send.tensor.numel() == recv->tensor.numel(), "exchange: the rank sends ",
                send.tensor.numel(), " elements to itself and expects ", recv->tensor.numel());
    messages.emplace_back(send.tensor, recv->tensor);
    ++recv;
  }
  BAGUA_CHECK(std::none_of(recv, recvs.end(), is_own),
              "exchange: a receive from the rank itself has no send");
  return messages;
}

inline void check_exchange(c10::ArrayRef<Send> sends, c10::ArrayRef<Recv> recvs, Group group) {
  for (const Send& send : sends) {
    check_dense("exchange", send.tensor);
    check_peer("exchange", send.peer, group);
  }
  for (const Recv& recv : recvs) {
    check_dense("exchange", recv.tensor);
    check_peer("exchange", recv.peer, group);
  }
  own_messages(sends, recvs, group.rank);
}

}  // namespace bagua
