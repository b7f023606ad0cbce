// Translates Communicator calls to NCCL.
#pragma once

#include <cstddef>
#include <vector>

#include <ATen/core/Tensor.h>

#include "comm/call_site.h"
#include "comm/communicator.h"
#include "comm/nccl/nccl_functions.h"

namespace bagua {

ncclRedOp_t to_nccl(ReduceOp op);

// Throws Error for a dtype that NCCL cannot reduce.
ncclDataType_t to_nccl(at::ScalarType type);

// A message of a group call, either way.
struct Message {
  std::byte* data;
  size_t bytes;
  int peer;
};

inline std::byte* bytes_of(const at::Tensor& tensor) {
  return static_cast<std::byte*>(tensor.data_ptr());
}

// The non-empty messages.
template <typename Endpoint>
std::vector<Message> messages_of(c10::ArrayRef<Endpoint> endpoints) {
  std::vector<Message> messages;
  messages.reserve(endpoints.size());
  for (const Endpoint& endpoint : endpoints) {
    if (endpoint.tensor.numel() == 0) continue;
    messages.push_back({bytes_of(endpoint.tensor), endpoint.tensor.nbytes(), endpoint.peer});
  }
  return messages;
}

// All messages in one group of calls.
ncclResult_t transfer(const NcclFunctions& nccl, ncclComm_t comm, cudaStream_t stream,
                      const std::vector<Message>& recvs, const std::vector<Message>& sends);

CallSite exchange_site(c10::ArrayRef<Send> sends, c10::ArrayRef<Recv> recvs);

}  // namespace bagua
