// The steps of low-rank products in plain loops: a slow reference for the kernels.
#pragma once

#include <cmath>
#include <cstdint>
#include <vector>

#include "math/low_rank_kernels.h"
#include "math/thin_factors.h"

namespace bagua {

// Sums are in double.
class LowRankReference final : public LowRankKernels {
 public:
  void project_rows(const LowRankPlan& plan, const LowRankMemory& memory, void*) const override {
    *memory.finite = true;
    with_types(plan, memory, [&]<typename W, typename T>(W, T, const LowRankItem& item) {
      const T* const flat = static_cast<const T*>(memory.flat) + item.offset;
      const auto unscale = static_cast<W>(1.0 / memory.scale);
      W* const left = static_cast<W*>(memory.left) + item.left;
      if (item.rank == 0) {
        for (int64_t i = 0; i < item.columns; ++i) left[i] = widen(flat[i]) * unscale;
        return;
      }
      W* const m = static_cast<W*>(memory.work) + item.offset;
      for (int64_t i = 0; i < item.rows * item.columns; ++i) {
        const W value = unscale * widen(flat[i]);
        m[i] = memory.error ? static_cast<const W*>(memory.error)[item.offset + i] + value : value;
      }
      const W* const q = static_cast<const W*>(memory.queries) + item.right;
      for (int64_t k = 0; k < item.rank; ++k) {
        for (int64_t row = 0; row < item.rows; ++row) {
          double sum = 0;
          for (int64_t c = 0; c < item.columns; ++c) {
            sum += double{m[row * item.columns + c]} * double{q[k * item.columns + c]};
          }
          left[k * item.rows + row] = static_cast<W>(sum);
        }
      }
    });
  }

  void orthonormalise(const LowRankPlan& plan, const LowRankMemory& memory, void*) const override {
    with_types(plan, memory, [&]<typename W, typename T>(W, T, const LowRankItem& item) {
      if (item.rank == 0) return;
      W* const p = static_cast<W*>(memory.left) + item.left;
      const int64_t n = item.rows;
      std::vector<double> vectors(p, p + item.rank * n);
      bool is_finite = true;
      for (const double value : vectors) is_finite = is_finite && std::isfinite(value);
      for (int64_t k = 0; k < item.rank; ++k) {
        double* const own = vectors.data() + k * n;
        const double before = std::sqrt(dot(own, own, n));
        for (int64_t step = 0; step < 2 * k; ++step) {
          const double* const other = vectors.data() + step % k * n;
          const double part = dot(own, other, n);
          for (int64_t i = 0; i < n; ++i) own[i] -= part * other[i];
        }
        const double after = std::sqrt(dot(own, own, n));
        const bool is_gone = is_finite && after <= kDependent * before;
        memory.vanished[item.vectors + k] = is_gone;
        for (int64_t i = 0; i < n; ++i) {
          own[i] = is_gone ? 0 : own[i] / after;
          p[k * n + i] = static_cast<W>(is_finite ? own[i] : NAN);
        }
      }
    });
  }

  void project_columns(const LowRankPlan& plan, const LowRankMemory& memory, void*) const override {
    with_types(plan, memory, [&]<typename W, typename T>(W, T, const LowRankItem& item) {
      const W* const p = static_cast<const W*>(memory.left) + item.left;
      const W* const m = static_cast<const W*>(memory.work) + item.offset;
      W* const q = static_cast<W*>(memory.right) + item.right;
      for (int64_t i = 0; i < item.rank * item.columns; ++i) {
        double sum = 0;
        for (int64_t row = 0; row < item.rows; ++row) {
          sum += double{p[i / item.columns * item.rows + row]} *
                 double{m[row * item.columns + i % item.columns]};
        }
        q[i] = static_cast<W>(sum);
      }
    });
  }

  void keep_queries(const LowRankPlan& plan, const LowRankMemory& memory, void*) const override {
    with_types(plan, memory, [&]<typename W, typename T>(W, T, const LowRankItem& item) {
      for (int64_t i = 0; i < item.rank * item.columns; ++i) {
        const int64_t at = item.right + i;
        W& mean = static_cast<W*>(memory.right)[at];
        mean /= static_cast<W>(memory.ranks);
        const bool is_gone = memory.vanished[item.vectors + i / item.columns];
        static_cast<W*>(memory.next_queries)[at] =
            is_gone ? static_cast<const W*>(memory.queries)[at] : mean;
      }
    });
  }

  void reconstruct(const LowRankPlan& plan, const LowRankMemory& memory, void*) const override {
    with_types(plan, memory, [&]<typename W, typename T>(W, T, const LowRankItem& item) {
      const W* const p = static_cast<const W*>(memory.left) + item.left;
      const W* const q = static_cast<const W*>(memory.right) + item.right;
      for (int64_t i = 0; i < item.rows * item.columns; ++i) {
        const int64_t row = i / item.columns, column = i % item.columns;
        double sum = item.rank == 0 ? double{p[i]} / memory.ranks : 0;
        for (int64_t k = 0; k < item.rank; ++k) {
          sum += double{p[k * item.rows + row]} * double{q[k * item.columns + column]};
        }
        const T result = narrow_to<T>(static_cast<W>(memory.scale * sum));
        static_cast<T*>(memory.flat)[item.offset + i] = result;
        if (!std::isfinite(widen(result))) *memory.finite = false;
        if (!memory.error) continue;
        W& residual = static_cast<W*>(memory.work)[item.offset + i];
        residual =
            item.rank == 0 ? 0 : residual - static_cast<W>(1.0 / memory.scale) * widen(result);
      }
    });
  }

 private:
  // Calls function(W{}, T{}, item) for every item.
  template <typename Function>
  static void with_types(const LowRankPlan& plan, const LowRankMemory& memory, Function function) {
    visit_low_rank(memory.dtype, [&]<typename W, typename T>(W, T) {
      for (int64_t i = 0; i < plan.item_count; ++i) function(W{}, T{}, plan.items[i]);
    });
  }
  static double dot(const double* x, const double* y, int64_t n) {
    double sum = 0;
    for (int64_t i = 0; i < n; ++i) sum += x[i] * y[i];
    return sum;
  }
};

}  // namespace bagua
