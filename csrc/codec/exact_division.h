// Many divisions by one divisor, each with the bits of an IEEE division and without its cost.
//
// A correctly rounded division is a dozen instructions and a branch on a GPU, which would hold a
// decoder of 16-bit elements off the memory roofline; this is five multiply-adds.
#pragma once

#include <concepts>

#include "base/dtype.h"
#include "codec/codecs/minmax_uint8.h"

namespace bagua {

struct Divisor {
  float value;
  float reciprocal;  // 1 / value, rounded
};

BAGUA_HD Divisor make_divisor(float value) { return {value, 1.0f / value}; }

// dividend / divisor, rounded to nearest, ties to even. Asks that divisor and reciprocal are normal
// numbers, that the dividend is zero or at least 1 and at most 2^24 in magnitude, and that the
// quotient is at most half the largest float: nothing over- or underflows on the way.
//
// Why it is exact: two rounded factors leave the first quotient at most 1.5 units in the last place
// off. The first correction leaves less than 2^-21 of that before it is rounded, so that the second
// quotient is one of the two neighbours of the true one (or is it). Then its remainder is exact,
// and Markstein's theorem (IBM Journal of Research and Development 34(1), 1990, theorem 8: a
// correctly rounded reciprocal, a quotient within one unit) makes the last step round correctly.
BAGUA_HD float divide(float dividend, Divisor divisor) {
  const float guess = dividend * divisor.reciprocal;
  const float error = __builtin_fmaf(-divisor.value, guess, dividend);
  const float neighbour = __builtin_fmaf(error, divisor.reciprocal, guess);
  const float remainder = __builtin_fmaf(-divisor.value, neighbour, dividend);
  return __builtin_fmaf(remainder, divisor.reciprocal, neighbour);
}

// Format::dequantise<T> for all codes of one grid. Where `plain` is false, call dequantise instead.
template <typename Format, typename T>
struct PlainDequantiser {
  typename Format::Grid grid;
  static constexpr bool plain = true;

  BAGUA_HD explicit PlainDequantiser(typename Format::Grid of) : grid(of) {}
  BAGUA_HD T operator()(uint8_t code) const { return Format::template dequantise<T>(code, grid); }
};

// Specialisation for the grid of 8 bits that divides. Grids are not plain if all their values are
// equal, or nearly so for their distance from zero, or if values lie near the largest number of T,
// where that clamps.
template <typename Format, typename T>
  requires std::same_as<typename Format::Grid, QuantisationGrid>
struct PlainDequantiser<Format, T> {
  Divisor scale;
  float offset;
  bool plain;

  BAGUA_HD explicit PlainDequantiser(QuantisationGrid grid)
      : scale(make_divisor(grid.scale)), offset(grid.lower - kCodeBase) {
    constexpr float kHalf = kLargestFinite<T> * 0.5f;
    const float first = grid.lower / grid.scale;
    const float last = (grid.lower + 255.0f) / grid.scale;
    plain = !grid.constant && first >= -kHalf && last <= kHalf && grid.lower >= -kCodeBase / 2 &&
            grid.lower <= kCodeBase / 2;
  }

  // A code in the lowest bits of 2^23 is a float, and adding `offset` leaves code + lower without
  // rounding: two cheap steps instead of a conversion and an addition.
  BAGUA_HD T operator()(uint8_t code) const {
    const float level = bits_to_float(kCodeBaseBits | code) + offset;
    const float value = divide(level, scale);
    if (value != value) __builtin_unreachable();  // spares narrow its test
    return narrow<T>(value);
  }

 private:
  static constexpr uint32_t kCodeBaseBits = 0x4b000000;
  static constexpr float kCodeBase = 0x1p23f;
};

}  // namespace bagua
