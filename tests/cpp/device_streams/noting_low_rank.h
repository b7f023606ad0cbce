// The low-rank products of the fake device.
#pragma once

#include <memory>

#include "device_streams/noting.h"
#include "kernels/low_rank_reference.h"
#include "op/low_rank.h"

namespace bagua::fake {

// Notes what the kernels would touch, whole arrays at a time (math/cuda/low_rank_kernels_cuda.cu).
class NotingLowRank final : public LowRankKernels {
 public:
  void project_rows(const LowRankPlan& plan, const LowRankMemory& memory,
                    void* stream) const override {
    count({.launches = 1});
    const Sizes n(plan, memory);
    note_plan(plan, stream);
    note("project_rows", stream, memory.flat, n.numel * n.element, false);
    if (memory.error) note("project_rows", stream, memory.error, n.numel * n.wide, false);
    const bool is_stored = memory.error || memory.scale != 1 || memory.work != memory.flat;
    note("project_rows", stream, memory.work, is_stored ? n.numel * n.wide : 0, true);
    note("project_rows", stream, memory.queries, n.right * n.wide, false);
    note("project_rows", stream, memory.left, (n.left + n.rest) * n.wide, true);
    note("project_rows", stream, memory.finite, sizeof(bool), true);
    reference_.project_rows(plan, memory, nullptr);
  }

  void orthonormalise(const LowRankPlan& plan, const LowRankMemory& memory,
                      void* stream) const override {
    const Sizes n(plan, memory);
    count({.launches = n.left > 0 ? 1 : 0});
    note_plan(plan, stream);
    // A vector is normalised in three passes, and projected twice on each before it, in two.
    for (int64_t i = 0; i < plan.matrices; ++i) {
      const LowRankItem& matrix = plan.items[i];
      const int64_t projections = matrix.rank * (matrix.rank - 1);
      const int64_t bytes = matrix.rows * int64_t{sizeof(double)};
      double* const vectors = memory.vectors + matrix.left;
      note("orthonormalise", stream, vectors, matrix.rank * bytes, true);
      count({.bytes_read = (3 * matrix.rank + 4 * projections) * bytes,
             .bytes_written = (matrix.rank + projections) * bytes});
    }
    for (const bool write : {false, true}) {
      note("orthonormalise", stream, memory.left, n.left * n.wide, write);
    }
    note("orthonormalise", stream, memory.vanished, n.vectors, true);
    reference_.orthonormalise(plan, memory, nullptr);
  }

  void project_columns(const LowRankPlan& plan, const LowRankMemory& memory,
                       void* stream) const override {
    const Sizes n(plan, memory);
    count({.launches = n.left > 0 ? 2 : 0});
    note_plan(plan, stream);
    if (n.left > 0) note("project_columns", stream, memory.work, n.numel * n.wide, false);
    note("project_columns", stream, memory.left, n.left * n.wide, false);
    for (const bool write : {true, false}) {
      note("project_columns", stream, memory.partials, n.partials * n.wide, write);
    }
    note("project_columns", stream, memory.right, n.right * n.wide, true);
    reference_.project_columns(plan, memory, nullptr);
  }

  void keep_queries(const LowRankPlan& plan, const LowRankMemory& memory,
                    void* stream) const override {
    const Sizes n(plan, memory);
    count({.launches = n.left > 0 ? 1 : 0});
    note_plan(plan, stream);
    note("keep_queries", stream, memory.vanished, n.vectors, false);
    note("keep_queries", stream, memory.queries, n.right * n.wide, false);
    for (const bool write : {false, true}) {
      note("keep_queries", stream, memory.right, n.right * n.wide, write);
    }
    note("keep_queries", stream, memory.next_queries, n.right * n.wide, true);
    reference_.keep_queries(plan, memory, nullptr);
  }

  void reconstruct(const LowRankPlan& plan, const LowRankMemory& memory,
                   void* stream) const override {
    const Sizes n(plan, memory);
    count({.launches = 1});
    note_plan(plan, stream);
    note("reconstruct", stream, memory.left, (n.left + n.rest) * n.wide, false);
    note("reconstruct", stream, memory.right, n.right * n.wide, false);
    note("reconstruct", stream, memory.flat, n.numel * n.element, true);
    for (const bool write : {false, true}) {
      if (memory.error) note("reconstruct", stream, memory.work, n.numel * n.wide, write);
    }
    note("reconstruct", stream, memory.finite, sizeof(bool), true);
    reference_.reconstruct(plan, memory, nullptr);
  }

 private:
  // Elements of the arrays, and bytes of an element.
  struct Sizes {
    int64_t numel = 0, left = 0, rest = 0, right = 0, vectors = 0, partials = 0;
    int64_t element = 0, wide = 0;

    Sizes(const LowRankPlan& plan, const LowRankMemory& memory) {
      visit_low_rank(memory.dtype, [&]<typename W, typename T>(W, T) {
        element = sizeof(T);
        wide = sizeof(W);
      });
      for (int64_t i = 0; i < plan.item_count; ++i) {
        const LowRankItem& item = plan.items[i];
        numel += item.rows * item.columns;
        rest += item.rank == 0 ? item.columns : 0;
        left += item.rank * item.rows;
        right += item.rank * item.columns;
        vectors += item.rank;
        partials += tile_rows(item) * item.rank * item.columns;
      }
    }
  };

  static void note_plan(const LowRankPlan& plan, void* stream) {
    const auto bytes = static_cast<int64_t>(plan.item_count * sizeof(LowRankItem) +
                                            (plan.band_count + plan.tile_count + plan.query_count) *
                                                sizeof(LowRankUnit));
    note("the plan", stream, plan.bands, bytes, false);
  }

  const LowRankReference reference_;
};

}  // namespace bagua::fake
