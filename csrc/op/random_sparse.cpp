#include "op/random_sparse.h"

#include <algorithm>
#include <limits>
#include <utility>

#include <ATen/ops/index_select.h>
#include <c10/core/DeviceGuard.h>

#include "base/check.h"
#include "comm/device_stream.h"
#include "comm/host_memory.h"
#include "op/tensors/all_finite.h"

namespace bagua {

RandomSparse::RandomSparse(std::shared_ptr<Communicator> communicator,
                           std::shared_ptr<Scratch> scratch, int64_t numel, int64_t k,
                           uint64_t seed, std::shared_ptr<RoundMemory> memory,
                           std::shared_ptr<const OrderKernel> order)
    : communicator_(std::move(communicator)),
      scratch_(std::move(scratch)),
      k_(k),
      seed_(seed),
      feedback_("RandomSparse", numel, std::move(memory), scratch_),
      order_(std::move(order)) {
  BAGUA_CHECK_ARG(k <= numel && (k >= 1 || numel == 0), "RandomSparse: k = ", k,
                  " must be between 1 and the ", numel, " elements of the bucket.");
  if (order_ || !feedback_.device().is_cuda()) return;
  const c10::DeviceGuard on_device(feedback_.device());
  order_ = make_cuda_order_kernel();
}

at::Tensor RandomSparse::elements_of_round(at::Device device) const {
  const int64_t n = feedback_.numel(), rounds = (n + k_ - 1) / k_;
  const int64_t done = feedback_.communications();
  const RandomOrder order(n, seed_, done / rounds);
  const int64_t first = done % rounds * k_, count = std::min(k_, n - first);
  if (!device.is_cpu() && order_) {
    at::Tensor elements = scratch_->get(Scratch::kIndices, count, at::kLong, device);
    order_->fill(order, first, count, elements.mutable_data_ptr<int64_t>(),
                 current_stream_handle(device));
    return elements;
  }
  // Memory of its own on a device, which may read it while the next round is begun.
  at::Tensor elements = device.is_cpu() ? scratch_->get(Scratch::kIndices, count, at::kLong, device)
                                        : host_memory({count}, at::kLong, device);
  auto* out = elements.mutable_data_ptr<int64_t>();
  for (int64_t i = 0; i < count; ++i) out[i] = order.at(first + i);
  return elements.to(device, /*non_blocking=*/true);
}

void RandomSparse::run(at::Tensor& flat, const Round& round) {
  feedback_.check(flat, round);
  if (feedback_.numel() == 0) return feedback_.leave(flat, round);
  // 1.
  at::Tensor m = feedback_.corrected(flat, round);
  // 2.
  const at::Tensor elements = elements_of_round(m.device());
  const int64_t count = elements.numel();
  at::Tensor message = scratch_->get(Scratch::kSend, count + 1, m.scalar_type(), m.device());
  at::Tensor values = message.narrow(0, 0, count), flag = message.narrow(0, count, 1);
  const double nan = std::numeric_limits<double>::quiet_NaN();
  const Finite finite = finite_of(m);
  flag.fill_(finite.here ? 0.0 : nan);
  if (finite.there.defined()) flag.masked_fill_(finite.there.logical_not(), nan);
  at::index_select_out(values, m, 0, elements);
  m.index_fill_(0, elements, 0);
  // 3.
  const int ranks = communicator_->group().size;
  if (ranks > 1) communicator_->all_reduce(message, ReduceOp::kSum);
  // 4. Arithmetic takes what was sent, not the bucket: all other elements are zeros.
  const double divisor = static_cast<double>(ranks) / round.grad_scale;
  values.add_(flag);
  if (divisor != 1.0) values.div_(divisor);
  const at::Tensor mean = values.to(flat.scalar_type());
  flat.zero_().index_copy_(0, elements, mean);
  feedback_.leave(mean, round);
}

std::string RandomSparse::describe() const {
  return concat("RandomSparse(", k_, " of ", feedback_.numel(), ", seed ", seed_, ", ranks ",
                communicator_->group().size, feedback_.remembers() ? "" : ", no error feedback",
                ")");
}

}  // namespace bagua
