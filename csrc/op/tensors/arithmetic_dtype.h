// Dtype in which the sums of a bucket are formed.
#pragma once

#include <c10/core/ScalarType.h>

namespace bagua {

// f64 for f64 buckets, f32 for all others.
constexpr c10::ScalarType arithmetic_dtype(c10::ScalarType bucket) {
  return bucket == c10::ScalarType::Double ? c10::ScalarType::Double : c10::ScalarType::Float;
}

}  // namespace bagua
