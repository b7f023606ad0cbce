// The steps of LowRank for all matrices of a shape at once, by ATen: for devices without kernels of
// ours, where launches are what small matrices wait for.
#pragma once

#include <vector>

#include <ATen/core/Tensor.h>

#include "op/tensors/low_rank_layout.h"

namespace bagua {

// Memory of one round; see LowRank.
struct LowRankValues {
  at::Tensor flat;     // the bucket
  at::Tensor error;    // as long; undefined: none
  at::Tensor work;     // as long, of the dtype that is computed in: all M
  at::Tensor queries;  // all Q of this round
  at::Tensor left;     // message: all P, then the non-matrix elements
  at::Tensor right;    // message: all Q'
  double scale;
};

// Step 1: M, P, and the non-matrix elements into the first message.
void project_rows(const LowRankLayout& layout, const LowRankValues& values);

// Step 3: Q'.
void project_columns(const LowRankLayout& layout, const LowRankValues& values);

// Step 5, but for Q, of means over `ranks`: the first message still has their sums of non-matrix
// elements, the second one has means.
void reconstruct(const LowRankLayout& layout, const LowRankValues& values, int ranks);

// Step 5, for Q: into `next`. `vanished`: for each batch of the layout as orthonormalise() gives
// it.
void keep_queries(const LowRankLayout& layout, const LowRankValues& values,
                  const std::vector<at::Tensor>& vanished, const at::Tensor& next);

}  // namespace bagua
