// Sums, means, minima and maxima of several ranks' values, in rank order.
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <span>

#include <c10/core/ScalarType.h>

#include "comm/communicator.h"
#include "comm/shm/layout.h"

namespace bagua {

// Some elements of a tensor, from `first`: a part of them for each rank, which begins at a line of
// memory.
struct BucketPiece {
  std::byte* first;
  int64_t numel;
  int64_t element;  // bytes
  int64_t step;     // elements of a rank

  BucketPiece(std::byte* first, int64_t numel, int size, int64_t element)
      : first(first), numel(numel), element(element) {
    const int64_t line = static_cast<int64_t>(kLineBytes) / element;
    step = ((numel + size - 1) / size + line - 1) / line * line;
  }
  int64_t begin(int rank) const { return std::min(numel, rank * step); }
  int64_t length(int rank) const { return begin(rank + 1) - begin(rank); }
  size_t bytes(int rank) const { return static_cast<size_t>(length(rank) * element); }
  std::byte* part(int rank) const { return first + begin(rank) * element; }
};

// Throws Error if there is no such reduction.
void check_reduction(at::ScalarType dtype, ReduceOp op);

// target[i] = sources[0][i] op sources[1][i] op ..., from left to right and rounded to the dtype
// after each step; kAvg divides each value by the number of sources first. NaN in, NaN out. `copy`,
// unless null, becomes equal to the target. The target may be one of the sources.
void reduce_in_order(std::byte* target, std::byte* copy, std::span<const std::byte* const> sources,
                     at::ScalarType dtype, ReduceOp op, int64_t numel);

}  // namespace bagua
