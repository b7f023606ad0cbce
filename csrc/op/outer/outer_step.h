// The outer optimizer's step on the anchor of local training.
#pragma once

#include <ATen/core/Tensor.h>

namespace bagua {

struct OuterRule {
  double lr;
  double momentum;
  bool nesterov;
};

// Steps, per element of the anchor a, the momentum m and the mean pseudo-gradient d:
//   1. m <- mu m + d;
//   2. u = d + mu m (Nesterov) or m (heavy ball);
//   3. a <- a - lr u.
// That is torch.optim.SGD without dampening. Each product and each sum is rounded by itself, so
// that equal values give equal bits on every processor, with any number of threads.
//
// All three are contiguous, of one dimension, one size, one dtype (float32 or float64) and one
// device. Throws std::invalid_argument for others.
void outer_step(at::Tensor anchor, at::Tensor momentum, const at::Tensor& mean,
                const OuterRule& rule);

// The sum of the products of two such tensors, in float64; not finite if an element is not. On the
// CPU the sum has one order, so that ranks with equal values have equal results. On a device the
// call waits for it.
double inner_product(const at::Tensor& a, const at::Tensor& b);

}  // namespace bagua
