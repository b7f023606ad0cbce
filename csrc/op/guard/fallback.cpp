#include "op/guard/fallback.h"

#include <utility>

#include "base/check.h"

namespace bagua {

Fallback::Fallback(std::shared_ptr<BucketOp> usual, std::shared_ptr<BucketOp> other)
    : usual_(std::move(usual)), other_(std::move(other)) {
  BAGUA_CHECK_ARG(usual_ && other_, "Fallback needs two operations.");
}

void Fallback::run(at::Tensor& flat, const Round& round) {
  (uses_other_ ? other_ : usual_)->run(flat, round);
}

}  // namespace bagua
