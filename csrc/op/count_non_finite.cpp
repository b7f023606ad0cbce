#include "op/count_non_finite.h"

#include <utility>

#include "base/check.h"
#include "op/tensors/all_finite.h"

namespace bagua {

CountNonFinite::CountNonFinite(std::shared_ptr<BucketOp> inner,
                               std::shared_ptr<NonFiniteRounds> rounds, at::Tensor result)
    : inner_(std::move(inner)), rounds_(std::move(rounds)), result_(std::move(result)) {
  BAGUA_CHECK_ARG(inner_ && rounds_, "CountNonFinite needs an operation and a counter.");
  BAGUA_CHECK_ARG(!result_.defined() || result_.is_cpu(),
                  "CountNonFinite: the result must be a CPU tensor, it is on ",
                  result_.device().str(), ".");
}

void CountNonFinite::run(at::Tensor& flat, const Round& round) {
  inner_->run(flat, round);
  if (!all_finite(result_.defined() ? result_ : flat)) rounds_->add();
}

}  // namespace bagua
