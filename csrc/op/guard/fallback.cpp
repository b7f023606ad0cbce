#include "op/guard/fallback.h"

#include <utility>

#include "base/check.h"

namespace bagua {

Fallback::Fallback(std::shared_ptr<BucketOp> usual, std::shared_ptr<BucketOp> exact)
    : usual_(std::move(usual)), exact_(std::move(exact)) {
  BAGUA_CHECK_ARG(usual_ && exact_, "Fallback needs two operations.");
}

void Fallback::run(at::Tensor& flat, const Round& round) {
  (uses_exact_ ? exact_ : usual_)->run(flat, round);
}

}  // namespace bagua
