#include "comm/nccl/nccl_calls.h"

#include "base/check.h"

namespace bagua {

ncclRedOp_t to_nccl(ReduceOp op) {
  switch (op) {
    case ReduceOp::kSum:
      return ncclSum;
    case ReduceOp::kAvg:
      return ncclAvg;
    case ReduceOp::kMin:
      return ncclMin;
    case ReduceOp::kMax:
      return ncclMax;
  }
  throw Error("unknown reduce op");
}

ncclDataType_t to_nccl(at::ScalarType type) {
  switch (type) {
    case at::kByte:
    case at::kBool:  // 0 and 1: max is any, min is all
      return ncclUint8;
    case at::kChar:
      return ncclInt8;
    case at::kInt:
      return ncclInt32;
    case at::kLong:
      return ncclInt64;
    case at::kHalf:
      return ncclFloat16;
    case at::kBFloat16:
      return ncclBfloat16;
    case at::kFloat:
      return ncclFloat32;
    case at::kDouble:
      return ncclFloat64;
    default:
      throw Error(concat("all_reduce: NCCL does not reduce ", dtype_text(type),
                         "; use uint8, int8, int32, int64, float16, bfloat16, float32 or float64"));
  }
}

// 1. Open a group. 2. Post every receive, then every send. 3. Close the group, whatever happened:
// an open one would swallow the calls of this thread to come.
ncclResult_t transfer(const NcclFunctions& nccl, ncclComm_t comm, cudaStream_t stream,
                      const std::vector<Message>& recvs, const std::vector<Message>& sends) {
  ncclResult_t result = nccl.group_start();
  if (result != ncclSuccess) return result;
  const auto good = [&] { return result == ncclSuccess || result == ncclInProgress; };
  for (const Message& recv : recvs) {
    if (good()) result = nccl.recv(recv.data, recv.bytes, ncclInt8, recv.peer, comm, stream);
  }
  for (const Message& send : sends) {
    if (good()) result = nccl.send(send.data, send.bytes, ncclInt8, send.peer, comm, stream);
  }
  const ncclResult_t closed = nccl.group_end();
  return good() ? closed : result;
}

// The bytes that leave or, where none do, arrive; the peer where there is only one.
CallSite exchange_site(c10::ArrayRef<Send> sends, c10::ArrayRef<Recv> recvs) {
  CallSite site{"exchange", 0, at::kByte, -1};
  bool first = true;
  const auto add = [&](const at::Tensor& tensor, int peer, bool counts) {
    if (counts) site.bytes += static_cast<int64_t>(tensor.nbytes());
    if (first) site.dtype = tensor.scalar_type();
    if (first) site.peer = peer;
    if (peer != site.peer) site.peer = -1;
    first = false;
  };
  for (const Send& send : sends) add(send.tensor, send.peer, true);
  for (const Recv& recv : recvs) add(recv.tensor, recv.peer, sends.empty());
  return site;
}

}  // namespace bagua
