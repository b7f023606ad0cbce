// Destinations of decoded elements on the device.
#pragma once

#include "base/device.h"
#include "base/dtype.h"
#include "codec/chunk_parts.h"
#include "codec/cuda/tile.cuh"

namespace bagua {

// The sinks of decoded elements, for vectors too.
template <typename T>
struct StoreVectors : Store<T> {
  static constexpr int kPerVector = kVectorBytes / sizeof(T);
  static constexpr bool kReads = false;
  BAGUA_DEVICE void put(Words<4>& vector, int k, T value) const { put_element(vector, k, value); }
};
template <typename T>
struct AddWeightedVectors : AddWeighted<T> {
  static constexpr int kPerVector = kVectorBytes / sizeof(float);
  static constexpr bool kReads = true;
  BAGUA_DEVICE void put(Words<4>& vector, int k, T value) const {
    put_element(vector, k, add_weighted(element_of<float>(vector, k), this->weight, value));
  }
};

// A decoded NaN has the same bits on every device; an instruction would choose its own.
template <typename T>
BAGUA_DEVICE T with_quiet_nan(T value) {
  if constexpr (sizeof(T) == sizeof(float)) {
    return value == value ? value : bits_to_float(kFloatQuietNanBits);
  } else {
    return value;  // narrow has seen to it
  }
}

}  // namespace bagua
