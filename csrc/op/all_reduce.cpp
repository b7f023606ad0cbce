#include "op/all_reduce.h"

#include "base/check.h"
#include "op/tensors/reals.h"

namespace bagua {

AllReduce::AllReduce(std::shared_ptr<Communicator> communicator, ReduceOp op)
    : communicator_(std::move(communicator)), op_(op) {
  BAGUA_CHECK_ARG(op == ReduceOp::kSum || op == ReduceOp::kAvg,
                  "AllReduce takes ReduceOp.SUM or ReduceOp.AVG.");
}

AllReduce::AllReduce(std::shared_ptr<Communicator> communicator, ReduceOp op,
                     const at::Tensor& flat)
    : AllReduce(std::move(communicator), op) {
  shared_ = communicator_->share(reals_of(flat));
  flat_ = flat;
}

void AllReduce::run(at::Tensor& flat, const Round&) {
  if (communicator_->group().size == 1) return;
  if (shared_) {
    BAGUA_CHECK(flat.data_ptr() == flat_.data_ptr() && flat.numel() == flat_.numel(),
                "AllReduce was made for another bucket, whose memory the ranks share");
    return shared_->all_reduce(op_);
  }
  at::Tensor reals = reals_of(flat);
  communicator_->all_reduce(reals, op_);
}

std::string AllReduce::describe() const {
  return concat("AllReduce(", op_ == ReduceOp::kAvg ? "mean" : "sum", ", ranks ",
                communicator_->group().size, ")");
}

}  // namespace bagua
