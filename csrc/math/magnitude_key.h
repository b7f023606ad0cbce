// An integer that orders as the magnitude of a number does.
#pragma once

#include <cstdint>
#include <limits>
#include <type_traits>

#include "base/host_device.h"

namespace bagua {

// Signed: vector instructions before AVX-512 compare no others.
template <typename T>
using Key = std::conditional_t<sizeof(T) == 4, int32_t, int64_t>;

template <typename T>
constexpr Key<T> kLargestKey = std::numeric_limits<Key<T>>::max();

template <typename T>
constexpr Key<T> kNanKey =
    __builtin_bit_cast(Key<T>, std::numeric_limits<T>::infinity()) + Key<T>{1};

// The bit pattern of |value|. Every NaN has one key, larger than infinity's.
template <typename T>
BAGUA_HD Key<T> key_of(T value) {
  const Key<T> magnitude = __builtin_bit_cast(Key<T>, value) & kLargestKey<T>;
  return magnitude < kNanKey<T> ? magnitude : kNanKey<T>;
}

}  // namespace bagua
