#include "comm/shm/reduction.h"

#include <algorithm>
#include <cstring>
#include <type_traits>

#include "base/check.h"
#include "base/dtype.h"
#include "base/host_device.h"
#include "base/per_instruction_set.h"
#include "comm/tensor_checks.h"

namespace bagua {
namespace {

// A block of all sources and of the sum stays in the first cache.
constexpr int64_t kBlockBytes = 4096;

// kFirstMean divides both values, kNextMean the second one.
enum class Step { kSum, kFirstMean, kNextMean, kMin, kMax };

template <typename T>
inline constexpr bool is_half = std::is_same_v<T, Half> || std::is_same_v<T, BFloat16>;

// Integers wrap around.
template <typename T>
BAGUA_HD T added(T a, T b) {
  if constexpr (is_half<T>) {
    return narrow<T>(widen(a) + widen(b));
  } else if constexpr (std::is_integral_v<T>) {
    using Wrapping = std::make_unsigned_t<T>;
    return static_cast<T>(
        static_cast<Wrapping>(static_cast<Wrapping>(a) + static_cast<Wrapping>(b)));
  } else {
    return a + b;
  }
}

template <typename T>
BAGUA_HD T divided(T a, int ranks) {
  if constexpr (is_half<T>) {
    return narrow<T>(widen(a) / static_cast<float>(ranks));
  } else {
    return a / static_cast<T>(ranks);
  }
}

template <typename T>
BAGUA_HD auto comparable(T a) {
  if constexpr (is_half<T>) {
    return widen(a);
  } else {
    return a;
  }
}

template <typename T>
BAGUA_HD T lesser_or_nan(T a, T b) {
  const auto x = comparable(a), y = comparable(b);
  return y < x || y != y ? b : a;
}

template <typename T>
BAGUA_HD T greater_or_nan(T a, T b) {
  const auto x = comparable(a), y = comparable(b);
  return y > x || y != y ? b : a;
}

template <typename T>
BAGUA_HD void join_values(T* out, const T* a, const T* b, int64_t numel, Step step, int ranks) {
  // `out` may be `a` or `b`, element by element: the vectoriser need not ask.
  switch (step) {
    case Step::kSum:
#pragma GCC ivdep
      for (int64_t i = 0; i < numel; ++i) out[i] = added(a[i], b[i]);
      return;
    case Step::kFirstMean:
#pragma GCC ivdep
      for (int64_t i = 0; i < numel; ++i) {
        out[i] = added(divided(a[i], ranks), divided(b[i], ranks));
      }
      return;
    case Step::kNextMean:
#pragma GCC ivdep
      for (int64_t i = 0; i < numel; ++i) out[i] = added(a[i], divided(b[i], ranks));
      return;
    case Step::kMin:
#pragma GCC ivdep
      for (int64_t i = 0; i < numel; ++i) out[i] = lesser_or_nan(a[i], b[i]);
      return;
    case Step::kMax:
#pragma GCC ivdep
      for (int64_t i = 0; i < numel; ++i) out[i] = greater_or_nan(a[i], b[i]);
      return;
  }
}

template <typename T>
BAGUA_HD void join_bytes(std::byte* out, const std::byte* a, const std::byte* b, int64_t numel,
                         Step step, int ranks) {
  join_values(reinterpret_cast<T*>(out), reinterpret_cast<const T*>(a),
              reinterpret_cast<const T*>(b), numel, step, ranks);
}

BAGUA_PER_INSTRUCTION_SET
void join(std::byte* out, const std::byte* a, const std::byte* b, at::ScalarType dtype,
          int64_t numel, Step step, int ranks) {
  switch (dtype) {
    case at::kFloat:
      return join_bytes<float>(out, a, b, numel, step, ranks);
    case at::kDouble:
      return join_bytes<double>(out, a, b, numel, step, ranks);
    case at::kHalf:
      return join_bytes<Half>(out, a, b, numel, step, ranks);
    case at::kBFloat16:
      return join_bytes<BFloat16>(out, a, b, numel, step, ranks);
    case at::kChar:
      return join_bytes<int8_t>(out, a, b, numel, step, ranks);
    case at::kShort:
      return join_bytes<int16_t>(out, a, b, numel, step, ranks);
    case at::kInt:
      return join_bytes<int32_t>(out, a, b, numel, step, ranks);
    case at::kLong:
      return join_bytes<int64_t>(out, a, b, numel, step, ranks);
    default:  // uint8 and bool
      return join_bytes<uint8_t>(out, a, b, numel, step, ranks);
  }
}

Step step_of(ReduceOp op, bool is_first) {
  switch (op) {
    case ReduceOp::kMin:
      return Step::kMin;
    case ReduceOp::kMax:
      return Step::kMax;
    case ReduceOp::kAvg:
      return is_first ? Step::kFirstMean : Step::kNextMean;
    default:
      return Step::kSum;
  }
}

}  // namespace

void check_reduction(at::ScalarType dtype, ReduceOp op) {
  const bool is_complex = dtype == at::kComplexFloat || dtype == at::kComplexDouble;
  const bool is_known = dtype == at::kFloat || dtype == at::kDouble || dtype == at::kHalf ||
                        dtype == at::kBFloat16 || dtype == at::kByte || dtype == at::kBool ||
                        dtype == at::kChar || dtype == at::kShort || dtype == at::kInt ||
                        dtype == at::kLong;
  BAGUA_CHECK(is_known || (is_complex && op == ReduceOp::kSum), "all_reduce: there is no ",
              reduce_op_text(op), " of ", dtype_text(dtype), ", convert it to another dtype");
}

void reduce_in_order(std::byte* target, std::byte* copy, std::span<const std::byte* const> sources,
                     at::ScalarType dtype, ReduceOp op, int64_t numel) {
  if (c10::isComplexType(dtype)) {
    return reduce_in_order(target, copy, sources, c10::toRealValueType(dtype), op, 2 * numel);
  }
  const auto element = static_cast<int64_t>(c10::elementSize(dtype));
  const int ranks = static_cast<int>(sources.size());
  alignas(64) std::byte sum[kBlockBytes];
  for (int64_t first = 0; first < numel; first += kBlockBytes / element) {
    const int64_t count = std::min(kBlockBytes / element, numel - first);
    const int64_t offset = first * element;
    const std::byte* so_far = sources[0] + offset;
    for (int rank = 1; rank < ranks; ++rank) {
      // The target is written last: it may be a source.
      std::byte* out = rank == ranks - 1 ? target + offset : sum;
      join(out, so_far, sources[rank] + offset, dtype, count, step_of(op, rank == 1), ranks);
      so_far = out;
    }
    if (copy != nullptr) std::memcpy(copy + offset, target + offset, count * element);
  }
}

}  // namespace bagua
