// Parts of a tensor that ranks reduce together.
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>

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

}  // namespace bagua
