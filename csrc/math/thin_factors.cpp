#include "math/thin_factors.h"

#include <algorithm>
#include <cmath>

#include "base/dtype.h"
#include "base/per_instruction_set.h"
#include "math/element_types.h"

namespace bagua {
namespace {

constexpr int kLanes = 16;

// Number of rows worked on at a time: the data between the passes over them stays in L1.
constexpr int64_t kTileNumel = 2048;

template <typename W>
BAGUA_HD W dot(const W* __restrict x, const W* __restrict y, int64_t n) {
  W lanes[kLanes] = {};
  const int64_t whole = n / kLanes * kLanes;
  for (int64_t i = 0; i < whole; i += kLanes) {
    for (int lane = 0; lane < kLanes; ++lane) lanes[lane] += x[i + lane] * y[i + lane];
  }
  for (int64_t i = whole; i < n; ++i) lanes[i - whole] += x[i] * y[i];
  W sum = 0;
  for (const W lane : lanes) sum += lane;
  return sum;
}

template <typename W>
BAGUA_HD void add_scaled(W* __restrict y, W a, const W* __restrict x, int64_t n) {
  for (int64_t i = 0; i < n; ++i) y[i] += a * x[i];
}

}  // namespace

template <typename W, typename T>
BAGUA_PER_INSTRUCTION_SET void project_rows(const T* x, W unscale, const W* error, W* m, const W* q,
                                            W* p, ThinShape shape, int64_t begin, int64_t end) {
  const auto [rows, columns, rank] = shape;
  for (int64_t row = begin; row < end; ++row) {
    for (int64_t k = 0; k < rank; ++k) p[k * rows + row] = 0;
    for (int64_t at = row * columns; at < (row + 1) * columns; at += kTileNumel) {
      const int64_t n = std::min(kTileNumel, (row + 1) * columns - at);
      const T* gradient = x + at;
      W* sum = m + at;
      if (error != nullptr) {
        const W* residual = error + at;
        for (int64_t i = 0; i < n; ++i) sum[i] = residual[i] + unscale * widen(gradient[i]);
      } else if (static_cast<const void*>(m) != static_cast<const void*>(x) || unscale != 1) {
        for (int64_t i = 0; i < n; ++i) sum[i] = unscale * widen(gradient[i]);
      }
      for (int64_t k = 0; k < rank; ++k) {
        p[k * rows + row] += dot(sum, q + k * columns + (at - row * columns), n);
      }
    }
  }
}

template <typename W>
BAGUA_PER_INSTRUCTION_SET void project_columns(const W* m, const W* p, W* q, ThinShape shape,
                                               int64_t begin, int64_t end) {
  const auto [rows, columns, rank] = shape;
  for (int64_t k = 0; k < rank; ++k)
    std::fill(q + k * columns + begin, q + k * columns + end, W(0));
  for (int64_t at = begin; at < end; at += kTileNumel) {
    const int64_t n = std::min(kTileNumel, end - at);
    for (int64_t row = 0; row < rows; ++row) {
      for (int64_t k = 0; k < rank; ++k) {
        add_scaled(q + k * columns + at, p[k * rows + row], m + row * columns + at, n);
      }
    }
  }
}

template <typename W, typename T>
BAGUA_PER_INSTRUCTION_SET void reconstruct_rows(const W* p, const W* q, W scale, T* x, W* m,
                                                ThinShape shape, int64_t begin, int64_t end) {
  const auto [rows, columns, rank] = shape;
  const W unscale = 1 / scale;
  W product[kTileNumel];
  for (int64_t row = begin; row < end; ++row) {
    for (int64_t column = 0; column < columns; column += kTileNumel) {
      const int64_t n = std::min(kTileNumel, columns - column);
      const W first = p[row];
      for (int64_t i = 0; i < n; ++i) product[i] = first * q[column + i];
      for (int64_t k = 1; k < rank; ++k) {
        add_scaled(product, p[k * rows + row], q + k * columns + column, n);
      }
      T* result = x + row * columns + column;
      for (int64_t i = 0; i < n; ++i) result[i] = narrow_to<T>(scale * product[i]);
      if (m == nullptr) continue;
      W* residual = m + row * columns + column;
      for (int64_t i = 0; i < n; ++i) residual[i] -= unscale * widen(result[i]);
    }
  }
}

BAGUA_PER_INSTRUCTION_SET void orthonormalise(double* vectors, int64_t count, int64_t n,
                                              bool* vanished) {
  for (int64_t k = 0; k < count; ++k) {
    double* own = vectors + k * n;
    const double before = std::sqrt(dot(own, own, n));
    for (int pass = 0; pass < 2; ++pass) {
      for (int64_t j = 0; j < k; ++j) {
        const double* other = vectors + j * n;
        add_scaled(own, -dot(own, other, n), other, n);
      }
    }
    const double after = std::sqrt(dot(own, own, n));
    vanished[k] = !(after > kDependent * before);
    for (int64_t i = 0; i < n; ++i) own[i] = vanished[k] ? 0.0 : own[i] / after;
  }
}

#define BAGUA_THIN_FACTORS(W, T)                                                          \
  template void project_rows(const T*, W, const W*, W*, const W*, W*, ThinShape, int64_t, \
                             int64_t);                                                    \
  template void reconstruct_rows(const W*, const W*, W, T*, W*, ThinShape, int64_t, int64_t);
BAGUA_THIN_FACTORS(float, float)
BAGUA_THIN_FACTORS(float, Half)
BAGUA_THIN_FACTORS(float, BFloat16)
BAGUA_THIN_FACTORS(double, double)
#undef BAGUA_THIN_FACTORS
template void project_columns(const float*, const float*, float*, ThinShape, int64_t, int64_t);
template void project_columns(const double*, const double*, double*, ThinShape, int64_t, int64_t);

}  // namespace bagua
