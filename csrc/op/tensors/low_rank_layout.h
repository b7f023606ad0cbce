// Layout of a bucket's matrices, their factors and its non-matrix elements in memory and messages.
#pragma once

#include <cstddef>
#include <cstdint>
#include <vector>

#include "math/low_rank_plan.h"

namespace bagua {

// Place of a matrix in the bucket (row after row), and the rank of its approximation.
struct LowRankMatrix {
  int64_t offset;  // elements from the start of the bucket
  int64_t rows;
  int64_t columns;
  int64_t rank;  // 1 to min(rows, columns)
};

// The first message is all P, those of equal shape side by side, then what of the bucket is no
// matrix; the second is all Q, in the order of the matrices.
struct LowRankLayout {
  struct Batch {  // P of one shape
    int64_t left;
    int64_t rows;
    int64_t rank;
    std::vector<size_t> members;  // positions in `matrices`
  };

  // Throws std::invalid_argument for matrices that are not in ascending order, overlap, or lie
  // outside of a bucket of `numel` elements, and for ranks that their matrices cannot have.
  LowRankLayout(int64_t numel, const std::vector<LowRankMatrix>& matrices);

  int64_t numel;
  std::vector<LowRankItem> matrices;  // as given
  std::vector<LowRankItem> rest;      // ranges of non-matrix elements
  std::vector<Batch> batches;
  int64_t left_numel = 0;   // of all P
  int64_t right_numel = 0;  // of all Q
  int64_t rest_numel = 0;

 private:
  void add_rest(int64_t begin, int64_t end);
};

}  // namespace bagua
