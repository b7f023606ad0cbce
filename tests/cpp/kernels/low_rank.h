// The kernels of low-rank products against plain loops, step by step. Included by kernels.cpp.
#pragma once

#include <cmath>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <limits>
#include <memory>
#include <string>
#include <vector>

#include "kernels/data.h"
#include "kernels/low_rank_reference.h"

namespace bagua {

struct LowRankShape {
  int64_t rows, columns, rank;  // rank 0: a range of `columns` elements
};

// Memory of a round, and what it points to.
template <typename W, typename T>
struct LowRankSide {
  std::vector<T> flat;
  std::vector<W> error, work, queries, left, right, next_queries, partials;
  std::vector<double> vectors;
  std::unique_ptr<bool[]> vanished;
  bool finite = false;
  LowRankMemory memory;

  LowRankSide(const LowRankTable& table, LowRankDType dtype, int64_t numel, int64_t left_numel,
              int64_t right_numel, bool has_error, double scale)
      : flat(numel),
        error(has_error ? numel : 0),
        work(numel, W{7}),
        queries(right_numel),
        left(left_numel, W{7}),
        right(right_numel, W{7}),
        next_queries(right_numel, W{7}),
        partials(table.partials(), W{7}),
        vectors(table.matrix_elements(), 7.0),
        vanished(std::make_unique<bool[]>(table.vectors())) {
    memory = {.dtype = dtype,
              .flat = flat.data(),
              .error = has_error ? error.data() : nullptr,
              .work = work.data(),
              .queries = queries.data(),
              .left = left.data(),
              .right = right.data(),
              .next_queries = next_queries.data(),
              .vectors = vectors.data(),
              .partials = partials.data(),
              .vanished = vanished.get(),
              .finite = &finite,
              .scale = scale,
              .ranks = 3};
    // The bucket itself, as where there is no error feedback.
    if (!has_error && std::is_same_v<W, T>) memory.work = flat.data();
  }

  // Takes over the values of the other side.
  void assign(const LowRankSide& other) {
    flat = other.flat;
    work = other.work;
    left = other.left;
    right = other.right;
  }
};

// Steps of one bucket: matrices of these shapes, and ranges.
template <typename W, typename T>
class LowRankComparison {
 public:
  LowRankComparison(const LowRankKernels& kernels, LowRankDType dtype,
                    const std::vector<LowRankShape>& shapes)
      : kernels_(kernels), dtype_(dtype), shapes_(shapes), table_(make_table()) {}

  void compare(const Pattern& pattern, bool has_error, double scale) {
    name_ = std::string(pattern.name) + (has_error ? ", " : ", without error feedback, ") +
            std::to_string(scale) + ", " + std::to_string(static_cast<int>(dtype_));
    Side expected(table_, dtype_, numel_, left_, right_, has_error, scale);
    const auto limit = static_cast<float>(kLargest);
    for (int64_t i = 0; i < numel_; ++i)
      expected.flat[i] = element(pattern.value(i, numel_, limit));
    for (size_t i = 0; i < expected.error.size(); ++i) expected.error[i] = uniform(3 * i) - 0.5f;
    for (int64_t i = 0; i < right_; ++i) expected.queries[i] = uniform(7 * i) - 0.5f;
    Side found(table_, dtype_, numel_, left_, right_, has_error, scale);
    found.assign(expected);
    found.error = expected.error;
    found.queries = expected.queries;
    const auto step = [&](const char* what, auto method) {
      (reference_.*method)(plan(), expected.memory, nullptr);
      (kernels_.*method)(plan(), found.memory, nullptr);
      check(what, expected, found);
      found.assign(expected);
    };
    step("project_rows", &LowRankKernels::project_rows);
    step("orthonormalise", &LowRankKernels::orthonormalise);
    step("project_columns", &LowRankKernels::project_columns);
    step("keep_queries", &LowRankKernels::keep_queries);
    step("reconstruct", &LowRankKernels::reconstruct);
  }

 private:
  using Side = LowRankSide<W, T>;
  static constexpr double kLargest = std::is_same_v<T, Half> ? 60000.0 : 1e30;

  static T element(float value) { return narrow_to<T>(static_cast<W>(value)); }
  LowRankPlan plan() const { return table_.at(table_.bytes().data()); }

  LowRankTable make_table() {
    std::vector<LowRankItem> matrices, ranges;
    for (const auto& [rows, columns, rank] : shapes_) {
      LowRankItem item{numel_, rows, columns, rank, left_, right_, 0, 0};
      numel_ += rows * columns;
      right_ += rank * columns;
      if (rank == 0) {
        ranges.push_back(item);
      } else {
        left_ += rank * rows;
        matrices.push_back(item);
      }
    }
    for (LowRankItem& range : ranges) {
      range.left = left_;
      left_ += range.columns;
    }
    return {matrices, ranges};
  }

  template <typename Element>
  void check_close(const std::string& what, const std::vector<Element>& expected,
                   const std::vector<Element>& found, double unit) const {
    double largest = 0;
    for (const Element& each : expected) {
      if (std::isfinite(widen(each))) largest = std::max<double>(largest, std::abs(widen(each)));
    }
    for (size_t i = 0; i < expected.size(); ++i) {
      const double a = widen(expected[i]), b = widen(found[i]);
      if (std::isnan(a) && std::isnan(b)) continue;
      if (a == b || std::abs(a - b) <= unit * largest) continue;
      std::printf("low rank, %s: %s: element %zu is %g, not %g\n", name_.c_str(), what.c_str(), i,
                  b, a);
      std::exit(1);
    }
  }

  void check(const std::string& step, const Side& expected, const Side& found) const {
    // Of the largest element: where a sum cancels, its terms decide the difference.
    const double of_sums = std::is_same_v<W, double> ? 1e-12 : 2e-5;
    const double of_bucket = std::is_same_v<T, BFloat16> ? 8e-3
                             : std::is_same_v<T, Half>   ? 1e-3
                                                         : of_sums;
    check_close(step + ", bucket", expected.flat, found.flat, of_bucket);
    check_close(step + ", work", expected.work, found.work, of_bucket);
    check_close(step + ", left", expected.left, found.left, of_sums);
    check_close(step + ", right", expected.right, found.right, of_sums);
    check_close(step + ", queries", expected.next_queries, found.next_queries, of_sums);
    const bool same_flags =
        expected.finite == found.finite &&
        std::memcmp(expected.vanished.get(), found.vanished.get(), table_.vectors()) == 0;
    if (same_flags) return;
    std::printf("low rank, %s: %s: flags differ\n", name_.c_str(), step.c_str());
    std::exit(1);
  }

  const LowRankKernels& kernels_;
  const LowRankReference reference_;
  const LowRankDType dtype_;
  const std::vector<LowRankShape> shapes_;
  int64_t numel_ = 0, left_ = 0, right_ = 0;
  const LowRankTable table_;
  std::string name_;
};

// Bands and tiles that are whole, or not; ranks below and above what one pass multiplies with.
inline void compare_low_rank(bool quick, bool every_dtype) {
  const auto kernels = make_cuda_low_rank_kernels();
  std::vector<LowRankShape> shapes = {{1, 3, 0},    {1, 1, 1},    {130, 33, 2},
                                      {1, 4100, 0}, {7, 600, 5},  {5, 7, 5},
                                      {300, 40, 4}, {2, 4200, 1}, {257, 129, 3}};
  if (quick) shapes = {{1, 35, 0}, {130, 33, 2}, {5, 40, 5}};
  for (const int number : {0, 2, 3}) {  // what is in range, not finite, and all zero
    const Pattern& pattern = kPatterns[number];
    for (const bool has_error : {true, false}) {
      for (const double scale : {1.0, 1024.0}) {
        if (quick && scale != 1.0) continue;
        LowRankComparison<float, float>(*kernels, LowRankDType::kFloat32, shapes)
            .compare(pattern, has_error, scale);
        LowRankComparison<float, Half>(*kernels, LowRankDType::kFloat16, shapes)
            .compare(pattern, has_error, scale);
        if (!every_dtype) continue;
        LowRankComparison<float, BFloat16>(*kernels, LowRankDType::kBFloat16, shapes)
            .compare(pattern, has_error, scale);
        LowRankComparison<double, double>(*kernels, LowRankDType::kFloat64, shapes)
            .compare(pattern, has_error, scale);
      }
    }
  }
  std::printf("low-rank products\n");
}

}  // namespace bagua
