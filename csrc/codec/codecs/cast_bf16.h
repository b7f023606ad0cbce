// bf16: every element rounded to bfloat16: float's range with 8 bits of precision.
#pragma once

#include "base/dtype.h"

namespace bagua {

struct CastBf16 {
  using Element = BFloat16;
};

}  // namespace bagua
