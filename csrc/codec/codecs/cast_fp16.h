// fp16: every element rounded to IEEE binary16. What exceeds 65504 becomes infinite.
#pragma once

#include "base/dtype.h"

namespace bagua {

struct CastFp16 {
  using Element = Half;
};

}  // namespace bagua
