// A matrix and the two thin factors that approximate it, on the CPU.
//
// W is what is computed in (float or double), T an element of the bucket: double with double;
// float, Half or BFloat16 with float. Matrices are row after row. Factors are vector after vector:
// P is rank x rows, Q is rank x columns. Every sum has one order, whatever the processor and
// however the work is divided into ranges, so that equal values give equal bits everywhere.
#pragma once

#include <cstdint>

namespace bagua {

struct ThinShape {
  int64_t rows;
  int64_t columns;
  int64_t rank;
};

// For the rows [begin, end): m = error + unscale * x, and their elements of P = M Q. `error` may be
// null, for none; m may be x.
template <typename W, typename T>
void project_rows(const T* x, W unscale, const W* error, W* m, const W* q, W* p, ThinShape shape,
                  int64_t begin, int64_t end);

// The columns [begin, end) of Q = P^T M (in the papers' layout M^T P).
template <typename W>
void project_columns(const W* m, const W* p, W* q, ThinShape shape, int64_t begin, int64_t end);

// For the rows [begin, end): x = scale * P Q^T rounded to T, and m -= x / scale unless m is null.
template <typename W, typename T>
void reconstruct_rows(const W* p, const W* q, W scale, T* x, W* m, ThinShape shape, int64_t begin,
                      int64_t end);

// A vector of which less than this part is left without those before it depends on them.
inline constexpr double kDependent = 1e-10;

// Orthonormalises `count` vectors of n elements by modified Gram-Schmidt, each projected twice;
// vanished[i]: vector i was zero, or depended on those before it: it becomes zero.
void orthonormalise(double* vectors, int64_t count, int64_t n, bool* vanished);

}  // namespace bagua
