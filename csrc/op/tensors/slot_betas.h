// Decay rates of momenta, one per slot of a bucket.
#pragma once

#include <cstddef>

#include <ATen/core/Tensor.h>

#include "base/check.h"

namespace bagua {

// Refuses what `op` cannot read from the host as one f64 per slot.
inline void check_betas(const at::Tensor& betas, size_t slots, const char* op) {
  BAGUA_CHECK_ARG(
      betas.defined() && betas.is_cpu() && betas.scalar_type() == at::kDouble && betas.dim() == 1 &&
          betas.is_contiguous() && betas.numel() == static_cast<int64_t>(slots),
      op, ": betas must be ", slots, " contiguous float64 in CPU memory, one per slot.");
}

}  // namespace bagua
