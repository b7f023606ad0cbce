// Passes between the weights that train and the anchor that the ranks share.
#pragma once

#include <vector>

#include <ATen/core/Tensor.h>

namespace bagua {

// In all of them x are the weights of a model, and a the anchors, in float32 (float64 for float64
// weights), one per weight and of its sizes. s(a) is a rounded to the weight's dtype and widened
// again. Autograd sees nothing. Throws std::invalid_argument where numbers, sizes or dtypes do not
// fit.
using Tensors = std::vector<at::Tensor>;

// Pseudo-gradients: deltas <- s(a) - x. Against s(a) a weight that nobody trained has delta 0,
// whatever its dtype. `launched`, where there are any, become x, for merge_anchors().
void take_deltas(const Tensors& weights, const Tensors& anchors, Tensors& deltas,
                 Tensors& launched);

// x <- s(a)
void take_anchors(Tensors& weights, const Tensors& anchors);

// Joins weights with anchors that arrive late, `launched` being the weights at the time of the
// pseudo-gradients: x <- x + (s(a) - launched), so that progress since then stays, once.
void merge_anchors(Tensors& weights, const Tensors& anchors, const Tensors& launched);

}  // namespace bagua
