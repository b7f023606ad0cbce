// The arithmetic of the fake NCCL: in double, rounded once at the end. An average multiplies by
// 1 / ranks, rounded to the dtype, as NCCL's does.
#pragma once

#include <algorithm>
#include <cstdint>
#include <cstring>
#include <type_traits>
#include <vector>

#include <c10/util/BFloat16.h>
#include <c10/util/Half.h>
#include <nccl.h>

namespace fake_nccl {

// Calls function(T{}) with the C++ type of `type`.
template <typename Function>
auto visit(ncclDataType_t type, Function function) {
  switch (type) {
    case ncclInt8:
      return function(int8_t{});
    case ncclUint8:
      return function(uint8_t{});
    case ncclInt32:
      return function(int32_t{});
    case ncclUint32:
      return function(uint32_t{});
    case ncclInt64:
      return function(int64_t{});
    case ncclUint64:
      return function(uint64_t{});
    case ncclFloat16:
      return function(c10::Half{});
    case ncclBfloat16:
      return function(c10::BFloat16{});
    case ncclFloat32:
      return function(float{});
    default:
      return function(double{});
  }
}

inline size_t size_of(ncclDataType_t type) {
  return visit(type, [](auto zero) { return sizeof(zero); });
}

inline std::vector<char> reduce(const std::vector<const void*>& inputs, size_t count,
                                ncclDataType_t type, ncclRedOp_t op) {
  std::vector<char> result(count * size_of(type));
  visit(type, [&](auto zero) {
    using T = decltype(zero);
    using Wide = std::conditional_t<std::is_integral_v<T>, int64_t, double>;
    for (size_t i = 0; i < count; ++i) {
      Wide value = static_cast<Wide>(static_cast<const T*>(inputs[0])[i]);
      for (size_t rank = 1; rank < inputs.size(); ++rank) {
        const Wide other = static_cast<Wide>(static_cast<const T*>(inputs[rank])[i]);
        if (op == ncclMin) value = std::min(value, other);
        if (op == ncclMax) value = std::max(value, other);
        if (op == ncclSum || op == ncclAvg) value += other;
      }
      if (op == ncclAvg) value *= static_cast<Wide>(static_cast<T>(1.0 / inputs.size()));
      reinterpret_cast<T*>(result.data())[i] = static_cast<T>(value);
    }
  });
  return result;
}

}  // namespace fake_nccl
