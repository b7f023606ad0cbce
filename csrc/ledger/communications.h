// The number of communications of an op: one int64 in CPU memory.
#pragma once

#include <ATen/core/Tensor.h>

#include "base/check.h"

namespace bagua {

// Throws std::invalid_argument, naming the op.
inline void check_communications(const at::Tensor& communications, const char* op) {
  BAGUA_CHECK_ARG(communications.defined() && communications.numel() == 1 &&
                      communications.scalar_type() == at::kLong && communications.is_cpu(),
                  op, ": communications must be one int64 in CPU memory.");
}

}  // namespace bagua
