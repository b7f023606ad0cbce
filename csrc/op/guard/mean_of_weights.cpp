#include "op/guard/mean_of_weights.h"

#include <utility>

#include <ATen/ops/isfinite.h>
#include <ATen/ops/where.h>

#include "base/check.h"

namespace bagua {

MeanOfWeights::MeanOfWeights(std::shared_ptr<Communicator> communicator, double share,
                             std::vector<at::Tensor> replicas)
    : communicator_(std::move(communicator)), share_(share), replicas_(std::move(replicas)) {
  BAGUA_CHECK_ARG(communicator_ && share_ > 0,
                  "MeanOfWeights needs a communicator and a share above 0.");
}

void MeanOfWeights::run(at::Tensor& flat, const Round&) {
  if (communicator_->group().size == 1) return;
  // 1.
  if (share_ != 1.0) flat.mul_(share_);
  // 2.
  communicator_->all_reduce(flat, ReduceOp::kAvg);
  // 3.
  for (at::Tensor& replica : replicas_) {
    replica.copy_(at::where(at::isfinite(flat), flat, replica.to(flat.scalar_type())));
  }
}

std::string MeanOfWeights::describe() const {
  return concat("MeanOfWeights(ranks ", communicator_->group().size, ")");
}

}  // namespace bagua
