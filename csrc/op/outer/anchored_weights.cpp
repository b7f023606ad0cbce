#include "op/outer/anchored_weights.h"

#include <ATen/core/grad_mode.h>
#include <ATen/ops/sub.h>

#include "base/check.h"
#include "op/tensors/arithmetic_dtype.h"

namespace bagua {
namespace {

void check_fit(const Tensors& weights, const Tensors& others, const char* what, bool wide) {
  BAGUA_CHECK_ARG(weights.size() == others.size(), weights.size(), " weights have ", others.size(),
                  " ", what, ".");
  for (size_t i = 0; i < weights.size(); ++i) {
    const at::Tensor &x = weights[i], &other = others[i];
    const at::ScalarType expected = wide ? arithmetic_dtype(x.scalar_type()) : x.scalar_type();
    BAGUA_CHECK_ARG(other.sizes() == x.sizes() && other.scalar_type() == expected &&
                        other.device() == x.device(),
                    "weight ", i, " is ", x.toString(), x.sizes(), " on ", x.device().str(),
                    ", its ", what, " ", other.toString(), other.sizes(), " on ",
                    other.device().str(), ". Wrap the model again after changing it.");
  }
}

at::Tensor rounded(const at::Tensor& anchor, at::ScalarType dtype) {
  return anchor.scalar_type() == dtype ? anchor : anchor.to(dtype).to(anchor.scalar_type());
}

}  // namespace

void take_deltas(const Tensors& weights, const Tensors& anchors, Tensors& deltas,
                 Tensors& launched) {
  check_fit(weights, anchors, "anchor", true);
  check_fit(weights, deltas, "delta", true);
  if (!launched.empty()) check_fit(weights, launched, "launched weight", false);
  const at::NoGradGuard no_grad;
  for (size_t i = 0; i < weights.size(); ++i) {
    const at::Tensor s = rounded(anchors[i], weights[i].scalar_type());
    at::sub_out(deltas[i], s, weights[i]);
  }
  for (size_t i = 0; i < launched.size(); ++i) launched[i].copy_(weights[i]);
}

void take_anchors(Tensors& weights, const Tensors& anchors) {
  check_fit(weights, anchors, "anchor", true);
  const at::NoGradGuard no_grad;
  for (size_t i = 0; i < weights.size(); ++i) weights[i].copy_(anchors[i]);
}

void merge_anchors(Tensors& weights, const Tensors& anchors, const Tensors& launched) {
  check_fit(weights, anchors, "anchor", true);
  check_fit(weights, launched, "launched weight", false);
  const at::NoGradGuard no_grad;
  for (size_t i = 0; i < weights.size(); ++i) {
    at::Tensor& x = weights[i];
    const at::Tensor s = rounded(anchors[i], x.scalar_type());
    x.copy_(x.to(anchors[i].scalar_type()).add(s.sub(launched[i])));
  }
}

}  // namespace bagua
