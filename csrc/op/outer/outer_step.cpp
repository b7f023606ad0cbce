#include "op/outer/outer_step.h"

#include <algorithm>
#include <array>
#include <vector>

#include <ATen/Parallel.h>
#include <ATen/ScalarOps.h>
#include <ATen/core/grad_mode.h>
#include <ATen/ops/empty_like.h>
#include <ATen/ops/mul.h>
#include <ATen/ops/stack.h>
#include <ATen/ops/sum.h>

#include "base/check.h"
#include "op/tensors/numel_at_once.h"

namespace bagua {
namespace {

constexpr int64_t kCached = 1 << 16;

void check_alike(const at::Tensor& a, const at::Tensor& b) {
  BAGUA_CHECK_ARG(
      a.sizes() == b.sizes() && a.strides() == b.strides() && a.scalar_type() == b.scalar_type() &&
          a.device() == b.device() && a.is_non_overlapping_and_dense() &&
          (a.scalar_type() == at::kFloat || a.scalar_type() == at::kDouble),
      "an outer step takes dense float32 or float64 tensors of equal sizes and "
      "strides, not ",
      a.toString(), a.sizes(), a.strides(), " and ", b.toString(), b.sizes(), b.strides(), ".");
}

void check_alike(const std::vector<at::Tensor>& a, const std::vector<at::Tensor>& b) {
  BAGUA_CHECK_ARG(a.size() == b.size(), "an outer step takes lists of equal length, not of ",
                  a.size(), " and ", b.size(), " tensors.");
  for (size_t i = 0; i < a.size(); ++i) check_alike(a[i], b[i]);
}

// The elements of a dense tensor as they lie in memory.
at::Tensor flat(const at::Tensor& dense) {
  return dense.as_strided({dense.numel()}, {1}, dense.storage_offset());
}

// One order of additions: element i of a piece is added in lane i mod kLanes.
template <typename T>
double sum_of_products(const T* a, const T* b, int64_t numel) {
  constexpr int64_t kLanes = 8;
  std::array<double, kLanes> lanes{};
  int64_t i = 0;
  for (; i + kLanes <= numel; i += kLanes) {
    for (int64_t lane = 0; lane < kLanes; ++lane) {
      lanes[lane] += static_cast<double>(a[i + lane]) * static_cast<double>(b[i + lane]);
    }
  }
  for (int64_t lane = 0; i < numel; ++i, ++lane) {
    lanes[lane] += static_cast<double>(a[i]) * static_cast<double>(b[i]);
  }
  double sum = 0;
  for (const double lane : lanes) sum += lane;
  return sum;
}

template <typename T>
double on_cpu(const at::Tensor& a, const at::Tensor& b) {
  const int64_t pieces = (a.numel() + kCached - 1) / kCached;
  std::vector<double> sums(pieces);
  const T *first = a.const_data_ptr<T>(), *second = b.const_data_ptr<T>();
  at::parallel_for(0, pieces, 1, [&](int64_t begin, int64_t end) {
    for (int64_t piece = begin; piece < end; ++piece) {
      const int64_t offset = piece * kCached;
      sums[piece] =
          sum_of_products(first + offset, second + offset, std::min(kCached, a.numel() - offset));
    }
  });
  double sum = 0;
  for (const double part : sums) sum += part;
  return sum;
}

void step(at::Tensor anchor, at::Tensor momentum, const at::Tensor& mean, const OuterRule& rule) {
  const int64_t at_once = numel_at_once(anchor, kCached);
  at::Tensor scratch = at::empty_like(mean.narrow(0, 0, std::min(at_once, mean.numel())));
  for (int64_t begin = 0; begin < mean.numel(); begin += at_once) {
    const int64_t numel = std::min(at_once, mean.numel() - begin);
    at::Tensor a = anchor.narrow(0, begin, numel), m = momentum.narrow(0, begin, numel);
    const at::Tensor d = mean.narrow(0, begin, numel);
    at::Tensor u = scratch.narrow(0, 0, numel);
    // 1.
    m.mul_(rule.momentum).add_(d);
    // 2.
    if (rule.nesterov) {
      at::mul_out(u, m, at::native::wrapped_scalar_tensor(rule.momentum));
      u.add_(d);
    } else {
      u.copy_(m);
    }
    // 3.
    a.sub_(u.mul_(rule.lr));
  }
}

}  // namespace

void outer_step(const std::vector<at::Tensor>& anchors, const std::vector<at::Tensor>& momenta,
                const std::vector<at::Tensor>& means, const OuterRule& rule) {
  check_alike(anchors, means);
  check_alike(momenta, means);
  const at::NoGradGuard no_grad;
  for (size_t i = 0; i < anchors.size(); ++i) {
    step(flat(anchors[i]), flat(momenta[i]), flat(means[i]), rule);
  }
}

double inner_product(const std::vector<at::Tensor>& a, const std::vector<at::Tensor>& b) {
  check_alike(a, b);
  double sum = 0;
  std::vector<at::Tensor> later;  // of a device
  for (size_t i = 0; i < a.size(); ++i) {
    const at::Tensor first = flat(a[i]), second = flat(b[i]);
    if (!first.is_cpu()) {
      later.push_back(at::sum(first.to(at::kDouble).mul_(second), at::kDouble));
    } else if (first.scalar_type() == at::kFloat) {
      sum += on_cpu<float>(first, second);
    } else {
      sum += on_cpu<double>(first, second);
    }
  }
  return later.empty() ? sum : sum + at::sum(at::stack(later)).item<double>();
}

}  // namespace bagua
