// bf16: every element rounded to bfloat16: float's range with 8 bits of precision.
#pragma once

#include <cstdint>

#include "base/dtype.h"
#include "base/host_device.h"

namespace bagua {

struct CastBf16 {
  static constexpr int kBits = 16;
  static constexpr int64_t kBlockNumel = 1;
  using Code = BFloat16;

  BAGUA_HD static Code quantise(float value) { return narrow<Code>(value); }

  template <typename T>
  BAGUA_HD static T dequantise(Code code) {
    return narrow<T>(widen(code));
  }
};

}  // namespace bagua
