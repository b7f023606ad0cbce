#include "op/settled_all_reduce.h"

#include <utility>

#include "base/check.h"

namespace bagua {

SettledAllReduce::SettledAllReduce(std::shared_ptr<Communicator> communicator,
                                   std::shared_ptr<Scratch> scratch, int64_t numel,
                                   std::shared_ptr<RoundMemory> memory)
    : communicator_(std::move(communicator)),
      feedback_("SettledAllReduce", numel, std::move(memory), std::move(scratch)) {}

void SettledAllReduce::run(at::Tensor& flat, const Round& round) {
  feedback_.check(flat, round);
  // 1.
  feedback_.pay(flat, round);
  // 2.
  if (communicator_->group().size > 1) communicator_->all_reduce(flat, ReduceOp::kAvg);
  // 3.
  feedback_.leave(flat, round);
}

std::string SettledAllReduce::describe() const {
  return concat("SettledAllReduce(mean, ranks ", communicator_->group().size, ")");
}

}  // namespace bagua
