// fp16: every element rounded to IEEE binary16. Values beyond 65504 become infinite.
#pragma once

#include <cstdint>

#include "base/dtype.h"
#include "base/host_device.h"

namespace bagua {

struct CastFp16 {
  static constexpr int kBits = 16;
  static constexpr int64_t kBlockNumel = 1;
  using Code = Half;

  BAGUA_HD static Code quantise(float value) { return narrow<Code>(value); }

  template <typename T>
  BAGUA_HD static T dequantise(Code code) {
    return narrow<T>(widen(code));
  }
};

}  // namespace bagua
