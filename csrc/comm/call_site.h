// Description of a failed call, for error messages.
#pragma once

#include <cstdint>
#include <string>

#include <ATen/core/Tensor.h>

#include "base/check.h"
#include "comm/tensor_checks.h"

namespace bagua {

struct CallSite {
  const char* call;
  int64_t bytes;
  at::ScalarType dtype;
  int peer;  // -1: more than one, or none known

  static CallSite of(const char* call, const at::Tensor& tensor, int peer = -1) {
    return {call, static_cast<int64_t>(tensor.nbytes()), tensor.scalar_type(), peer};
  }

  // "broadcast of 4096 bytes float32 with peer 1"
  std::string text() const {
    const std::string with = peer < 0 ? "" : concat(" with peer ", peer);
    return concat(call, " of ", bytes, " bytes ", dtype_text(dtype), with);
  }
};

}  // namespace bagua
