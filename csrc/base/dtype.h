// The dtypes that codecs read and write.
#pragma once

#include <cstdint>

#include "base/check.h"

namespace bagua {

enum class DType : uint8_t { kFloat32 = 0, kFloat16 = 1, kBFloat16 = 2 };

constexpr int64_t dtype_bytes(DType dtype) { return dtype == DType::kFloat32 ? 4 : 2; }

constexpr const char* dtype_name(DType dtype) {
  return dtype == DType::kFloat32 ? "float32" : dtype == DType::kFloat16 ? "float16" : "bfloat16";
}

}  // namespace bagua
