#include "engine/rank_samples.h"

#include <cmath>

#include <ATen/ScalarOps.h>
#include <ATen/ops/mul.h>

#include "base/check.h"
#include "engine/bucket.h"

namespace bagua {

double Weighing::factor(const RankSamples& own) const {
  if (!by_samples) return 1.0;
  return total > 0 ? own.number * ranks / total : 0.0;
}

double Weighing::factor_of_multiplied() const { return factor({.number = 1.0f, .said = true}); }

Weighing weighing_of(std::span<const RankSamples> all) {
  Weighing found{.ranks = static_cast<double>(all.size()), .total = 0.0, .by_samples = false};
  for (size_t rank = 0; rank < all.size(); ++rank) {
    if (!std::isfinite(all[rank].number) || all[rank].number < 0) {
      throw MismatchError(
          concat("rank ", rank, " sent a damaged record: ", all[rank].number, " samples."));
    }
    found.total += all[rank].number;
    found.by_samples = found.by_samples || all[rank].said;
  }
  return found;
}

void weigh(at::Tensor& values, double factor) {
  if (factor == 0.0) {
    values.zero_();
  } else if (factor != 1.0) {
    // By a tensor: mul_(Scalar) rounds the factor to the dtype of half-precision tensors.
    values.mul_(at::native::wrapped_scalar_tensor(factor));
  }
}

void weigh(const Bucket& bucket, double factor) {
  const std::shared_ptr<SparseGradient>& rows = bucket.slots.front().sparse;
  if (!rows) {
    at::Tensor flat = bucket.flat;
    return weigh(flat, factor);
  }
  if (factor == 0.0) {
    rows->local = at::Tensor();
  } else if (factor != 1.0 && rows->local.defined()) {
    rows->local = rows->local.mul(at::native::wrapped_scalar_tensor(factor));
  }
}

}  // namespace bagua
