#include "op/sampled.h"

#include <utility>

#include <ATen/ops/index_select.h>

#include "base/check.h"

namespace bagua {

Sampled::Sampled(std::shared_ptr<BucketOp> inner) : inner_(std::move(inner)) {
  BAGUA_CHECK_ARG(inner_, "Sampled needs an operation.");
}

std::optional<BucketSample> Sampled::take() { return std::exchange(sample_, std::nullopt); }

void Sampled::run(at::Tensor& flat, const Round& round) {
  if (!places_.defined()) return inner_->run(flat, round);
  const at::Tensor places = std::exchange(places_, at::Tensor());
  at::Tensor before = at::index_select(flat, 0, places);
  inner_->run(flat, round);
  sample_ = BucketSample{.before = std::move(before),
                         .after = at::index_select(flat, 0, places),
                         .grad_scale = round.grad_scale};
}

}  // namespace bagua
