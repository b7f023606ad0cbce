// The outer optimizer's step on the anchor of local training.
#pragma once

#include <vector>

#include <ATen/core/Tensor.h>

namespace bagua {

struct OuterRule {
  double lr;
  double momentum;
  bool nesterov;
};

// Steps, per element of an anchor a, its momentum m and mean pseudo-gradient d:
//   1. m <- mu m + d;
//   2. u = d + mu m (Nesterov) or m (heavy ball);
//   3. a <- a - lr u.
// That is torch.optim.SGD without dampening. Each product and each sum is rounded by itself, so
// that equal values give equal bits on every processor, with any number of threads.
//
// The tensors at one place of the lists are dense, of equal sizes and strides, of one dtype
// (float32 or float64) and on one device. Throws std::invalid_argument for others.
void outer_step(const std::vector<at::Tensor>& anchors, const std::vector<at::Tensor>& momenta,
                const std::vector<at::Tensor>& means, const OuterRule& rule);

// The sum of the products of all elements of such tensors, in float64; not finite if an element is
// not. On the CPU the sum has one order, so that ranks with equal values have equal results. On a
// device the call waits for it, once.
double inner_product(const std::vector<at::Tensor>& a, const std::vector<at::Tensor>& b);

}  // namespace bagua
