// Sums, means, minima and maxima of several ranks' values, in rank order.
#pragma once

#include <cstddef>
#include <cstdint>
#include <span>

#include <c10/core/ScalarType.h>

#include "comm/communicator.h"

namespace bagua {

// Throws Error if there is no such reduction.
void check_reduction(at::ScalarType dtype, ReduceOp op);

// target[i] = sources[0][i] op sources[1][i] op ..., from left to right and rounded to the dtype
// after each step; kAvg divides each value by the number of sources first. NaN in, NaN out. `copy`,
// unless null, becomes equal to the target. The target may be one of the sources.
void reduce_in_order(std::byte* target, std::byte* copy, std::span<const std::byte* const> sources,
                     at::ScalarType dtype, ReduceOp op, int64_t numel);

}  // namespace bagua
