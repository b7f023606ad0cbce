#include "op/error_feedback_all_reduce.h"

#include <utility>

#include "base/check.h"

namespace bagua {

ErrorFeedbackAllReduce::ErrorFeedbackAllReduce(std::shared_ptr<Communicator> communicator,
                                               std::shared_ptr<Scratch> scratch, int64_t numel,
                                               std::shared_ptr<RoundMemory> memory)
    : communicator_(std::move(communicator)),
      feedback_("ErrorFeedbackAllReduce", numel, std::move(memory), std::move(scratch)) {}

void ErrorFeedbackAllReduce::run(at::Tensor& flat, const Round& round) {
  feedback_.check(flat, round);
  // 1.
  feedback_.add_and_clear(flat, round);
  // 2.
  if (communicator_->group().size > 1) communicator_->all_reduce(flat, ReduceOp::kAvg);
  // 3.
  feedback_.leave(flat, round);
}

std::string ErrorFeedbackAllReduce::describe() const {
  return concat("ErrorFeedbackAllReduce(mean, ranks ", communicator_->group().size, ")");
}

}  // namespace bagua
