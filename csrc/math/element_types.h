// Elements of a bucket, f64 too, and what is computed in: double for double, float for the others.
#pragma once

#include <type_traits>

#include "base/dtype.h"

namespace bagua {

BAGUA_HD double widen(double value) { return value; }

// To an element of type T of what is computed in.
template <typename T, typename W>
BAGUA_HD T narrow_to(W value) {
  if constexpr (std::is_same_v<T, double>) {
    return value;
  } else {
    return narrow<T>(value);
  }
}

}  // namespace bagua
