// Whether numbers are finite, from their bits.
#pragma once

#include <cstdint>

#include "base/dtype.h"

namespace bagua {

// Whether none of the `numel` numbers at `x`, aligned to their type, is NaN or infinite. Exact,
// about as fast as memory is read. Any thread.
bool all_finite(const void* x, DType dtype, int64_t numel);
bool all_finite(const double* x, int64_t numel);

}  // namespace bagua
