// Exact selection of the elements of largest magnitude.
#pragma once

#include <cstdint>

namespace bagua {

// Writes the indices of the k elements of largest |x|, ascending. The order is total: every NaN
// counts as larger than infinity, and of equals the one with the lower index comes first. So the
// result depends on the values alone, and whatever is not finite is among the first to be chosen.
//
// Steps. A key is the bit pattern of |x|, which orders as the values do.
//   1. Count the keys by their highest bits that are undecided, and take the bin that holds the
//      k-th largest key.
//   2. Repeat with the keys of that bin and their next bits, until the k-th key is known or all
//      keys of the bin are wanted. A crowded bin may hold one value alone: then that is the k-th.
//   3. Write the indices of the larger keys, and of equal ones the first.
// A bin that already has k keys at or above it bounds the rest: blocks below it are passed over at
// the speed of reading. Reads x six times at most (f64: twelve), and needs no memory.
//
// T: float or double. 0 <= k <= n < 2^32; `indices` has room for k. Stateless, reentrant.
template <typename T>
void top_k(const T* x, int64_t n, int64_t k, uint32_t* indices);

extern template void top_k<float>(const float*, int64_t, int64_t, uint32_t*);
extern template void top_k<double>(const double*, int64_t, int64_t, uint32_t*);

}  // namespace bagua
