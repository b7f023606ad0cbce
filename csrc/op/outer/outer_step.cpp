#include "op/outer/outer_step.h"

#include <algorithm>
#include <array>
#include <vector>

#include <ATen/Parallel.h>
#include <ATen/ScalarOps.h>
#include <ATen/core/grad_mode.h>
#include <ATen/ops/empty_like.h>
#include <ATen/ops/mul.h>
#include <ATen/ops/sum.h>

#include "base/check.h"
#include "op/tensors/numel_at_once.h"

namespace bagua {
namespace {

constexpr int64_t kCached = 1 << 16;

void check_alike(const at::Tensor& a, const at::Tensor& b) {
  BAGUA_CHECK_ARG(a.dim() == 1 && a.sizes() == b.sizes() && a.scalar_type() == b.scalar_type() &&
                      a.device() == b.device() && a.is_contiguous() && b.is_contiguous() &&
                      (a.scalar_type() == at::kFloat || a.scalar_type() == at::kDouble),
                  "an outer step takes contiguous float32 or float64 of one dimension and one "
                  "size, not ",
                  a.toString(), a.sizes(), " and ", b.toString(), b.sizes(), ".");
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

}  // namespace

void outer_step(at::Tensor anchor, at::Tensor momentum, const at::Tensor& mean,
                const OuterRule& rule) {
  check_alike(anchor, mean);
  check_alike(momentum, mean);
  const at::NoGradGuard no_grad;
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

double inner_product(const at::Tensor& a, const at::Tensor& b) {
  check_alike(a, b);
  if (!a.is_cpu()) {
    return at::sum(a.to(at::kDouble).mul_(b), at::kDouble).item<double>();
  }
  return a.scalar_type() == at::kFloat ? on_cpu<float>(a, b) : on_cpu<double>(a, b);
}

}  // namespace bagua
