#include "math/finite.h"

#include <cstddef>
#include <cstring>

#include "base/host_device.h"
#include "base/per_instruction_set.h"

namespace bagua {
namespace {

// Elements that are looked at before the answer is.
constexpr int64_t kStretch = 16384;

// `exponent`: the bits that are all set in NaN and infinity, and in no finite number. Adding its
// lowest bit then carries beyond it, to where the sign was.
template <typename Word>
BAGUA_HD bool stretch_is_finite(const std::byte* x, Word exponent, int64_t numel) {
  constexpr auto kSign = static_cast<Word>(Word{1} << (8 * sizeof(Word) - 1));
  const auto lowest = static_cast<Word>(exponent & ~(exponent << 1));
  Word carried = 0;
  for (int64_t i = 0; i < numel; ++i) {
    Word bits;
    std::memcpy(&bits, x + i * static_cast<int64_t>(sizeof bits), sizeof bits);
    carried = static_cast<Word>(carried | static_cast<Word>((bits & exponent) + lowest));
  }
  return (carried & kSign) == 0;
}

template <typename Word>
BAGUA_PER_INSTRUCTION_SET bool words_are_finite(const void* x, Word exponent, int64_t numel) {
  const auto* bytes = static_cast<const std::byte*>(x);
  for (int64_t first = 0; first < numel; first += kStretch) {
    const int64_t count = numel - first < kStretch ? numel - first : kStretch;
    const auto offset = first * static_cast<int64_t>(sizeof(Word));
    if (!stretch_is_finite<Word>(bytes + offset, exponent, count)) return false;
  }
  return true;
}

}  // namespace

bool all_finite(const void* x, DType dtype, int64_t numel) {
  switch (dtype) {
    case DType::kFloat16:
      return words_are_finite<uint16_t>(x, 0x7c00, numel);
    case DType::kBFloat16:
      return words_are_finite<uint16_t>(x, 0x7f80, numel);
    default:
      return words_are_finite<uint32_t>(x, 0x7f800000, numel);
  }
}

bool all_finite(const double* x, int64_t numel) {
  return words_are_finite<uint64_t>(x, 0x7ff0000000000000, numel);
}

}  // namespace bagua
