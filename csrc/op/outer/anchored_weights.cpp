#include "op/outer/anchored_weights.h"

#include <ATen/core/grad_mode.h>
#include <ATen/ops/sub.h>

#include "base/check.h"
#include "comm/device_stream.h"
#include "comm/host_memory.h"
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
                        (other.device() == x.device() || other.is_cpu()),
                    "weight ", i, " is ", x.toString(), x.sizes(), " on ", x.device().str(),
                    ", its ", what, " ", other.toString(), other.sizes(), " on ",
                    other.device().str(), ". Wrap the model again after changing it.");
  }
}

at::Tensor rounded(const at::Tensor& anchor, at::ScalarType dtype) {
  return anchor.scalar_type() == dtype ? anchor : anchor.to(dtype).to(anchor.scalar_type());
}

// The weights beside their anchors: themselves, or memory for them on the host.
class Beside {
 public:
  Beside(const Tensors& weights, const Tensors& anchors) : weights_(weights), here_(weights) {
    for (size_t i = 0; i < weights.size(); ++i) {
      const at::Tensor& x = weights[i];
      if (anchors[i].device() == x.device()) continue;
      here_[i] = host_memory(x.sizes(), x.scalar_type(), x.device());
      device_ = x.device();
    }
  }

  at::Tensor& operator[](size_t i) { return here_[i]; }

  Beside& copy_down() {
    if (!device_) return *this;
    for (size_t i = 0; i < here_.size(); ++i) {
      if (!here_[i].is_same(weights_[i])) here_[i].copy_(weights_[i], /*non_blocking=*/true);
    }
    StreamPoints copied(*device_);
    copied.mark_current_stream();
    copied.synchronize();
    return *this;
  }

  void copy_up() {
    for (size_t i = 0; i < here_.size(); ++i) {
      if (!here_[i].is_same(weights_[i])) weights_[i].copy_(here_[i], /*non_blocking=*/true);
    }
  }

 private:
  Tensors weights_;
  Tensors here_;
  std::optional<at::Device> device_;  // of weights that are elsewhere
};

}  // namespace

void take_deltas(const Tensors& weights, const Tensors& anchors, Tensors& deltas,
                 Tensors& launched) {
  check_fit(weights, anchors, "anchor", true);
  check_fit(weights, deltas, "delta", true);
  if (!launched.empty()) check_fit(weights, launched, "launched weight", false);
  const at::NoGradGuard no_grad;
  Beside here(weights, anchors);
  here.copy_down();
  for (size_t i = 0; i < weights.size(); ++i) {
    const at::Tensor s = rounded(anchors[i], weights[i].scalar_type());
    at::sub_out(deltas[i], s, here[i]);
  }
  for (size_t i = 0; i < launched.size(); ++i) launched[i].copy_(here[i]);
}

void take_anchors(Tensors& weights, const Tensors& anchors) {
  check_fit(weights, anchors, "anchor", true);
  const at::NoGradGuard no_grad;
  Beside here(weights, anchors);
  for (size_t i = 0; i < weights.size(); ++i) here[i].copy_(anchors[i]);
  here.copy_up();
}

void merge_anchors(Tensors& weights, const Tensors& anchors, const Tensors& launched,
                   std::optional<double> alpha) {
  check_fit(weights, anchors, "anchor", true);
  if (!alpha) check_fit(weights, launched, "launched weight", false);
  const at::NoGradGuard no_grad;
  Beside here(weights, anchors);
  here.copy_down();
  for (size_t i = 0; i < weights.size(); ++i) {
    at::Tensor& x = here[i];
    const at::Tensor s = rounded(anchors[i], x.scalar_type());
    const at::Tensor wide = x.to(anchors[i].scalar_type());
    if (alpha) {
      x.copy_(wide.mul(*alpha).add_(s.mul(1 - *alpha)));
    } else {
      x.copy_(wide.add(s.sub(launched[i])));
    }
  }
  here.copy_up();
}

}  // namespace bagua
