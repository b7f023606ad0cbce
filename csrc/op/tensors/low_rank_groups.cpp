#include "op/tensors/low_rank_groups.h"

#include <ATen/ops/add.h>
#include <ATen/ops/bmm.h>
#include <ATen/ops/where.h>

namespace bagua {
namespace {

using MatrixGroup = LowRankLayout::Group;

at::Tensor view_of(const at::Tensor& memory, int64_t first, at::IntArrayRef sizes,
                   at::IntArrayRef strides) {
  return memory.as_strided(sizes, strides, memory.storage_offset() + first);
}

// [members, rows, columns] of memory that is as long as the bucket.
at::Tensor matrices(const LowRankLayout& layout, const MatrixGroup& group,
                    const at::Tensor& memory) {
  const LowRankMatrix& m = layout.placed[group.first].matrix;
  return view_of(memory, m.offset, {group.members, m.rows, m.columns},
                 {group.offset_step, m.columns, 1});
}

// [members, rank, rows]
at::Tensor left_factors(const LowRankLayout& layout, const MatrixGroup& group,
                        const at::Tensor& left) {
  const LowRankLayout::Placed& placed = layout.placed[group.first];
  const LowRankMatrix& m = placed.matrix;
  return view_of(left, placed.left, {group.members, m.rank, m.rows}, {group.left_step, m.rows, 1});
}

// [members, rank, columns]
at::Tensor right_factors(const LowRankLayout& layout, const MatrixGroup& group,
                         const at::Tensor& right) {
  const LowRankLayout::Placed& placed = layout.placed[group.first];
  const LowRankMatrix& m = placed.matrix;
  return view_of(right, placed.right, {group.members, m.rank, m.columns},
                 {group.right_step, m.columns, 1});
}

// [members, numel] of memory that is as long as the bucket, or of the first message.
at::Tensor ranges(const LowRankLayout& layout, const MatrixGroup& group, const at::Tensor& memory) {
  const LowRankLayout::Range& range = layout.rest[group.first];
  return view_of(memory, range.offset, {group.members, range.numel}, {group.offset_step, 1});
}
at::Tensor sent_ranges(const LowRankLayout& layout, const MatrixGroup& group,
                       const at::Tensor& left) {
  return view_of(left, layout.rest_left[group.first],
                 {group.members, layout.rest[group.first].numel}, {group.left_step, 1});
}

}  // namespace

void project_rows(const LowRankLayout& layout, const LowRankValues& values) {
  // Before M, which may take the bucket's memory.
  for (const MatrixGroup& group : layout.rest_groups) {
    sent_ranges(layout, group, values.left).copy_(ranges(layout, group, values.flat));
  }
  if (values.scale != 1.0 && layout.rest_numel > 0) {
    values.left.narrow(0, layout.left_numel, layout.rest_numel).mul_(1.0 / values.scale);
  }
  if (layout.groups.empty()) return;
  at::Tensor work = values.work;
  if (values.error.defined()) {
    at::add_out(work, values.error, values.flat, 1.0 / values.scale);
  } else if (values.scale != 1.0 || !work.is_same(values.flat)) {
    work.copy_(values.flat).mul_(1.0 / values.scale);
  }
  for (const MatrixGroup& group : layout.groups) {
    const at::Tensor q = right_factors(layout, group, values.queries);
    at::Tensor p = left_factors(layout, group, values.left);
    at::bmm_out(p, q, matrices(layout, group, work).mT());
  }
}

void project_columns(const LowRankLayout& layout, const LowRankValues& values) {
  for (const MatrixGroup& group : layout.groups) {
    at::Tensor q = right_factors(layout, group, values.right);
    at::bmm_out(q, left_factors(layout, group, values.left), matrices(layout, group, values.work));
  }
}

void reconstruct(const LowRankLayout& layout, const LowRankValues& values, int ranks) {
  for (const MatrixGroup& group : layout.groups) {
    const at::Tensor p = left_factors(layout, group, values.left).mT();
    const at::Tensor q = right_factors(layout, group, values.right);
    at::Tensor x = matrices(layout, group, values.flat);
    if (x.scalar_type() == q.scalar_type() && values.scale == 1.0) {
      at::bmm_out(x, p, q);
    } else if (x.scalar_type() == q.scalar_type()) {
      x.baddbmm_(p, q, /*beta=*/0, /*alpha=*/values.scale);
    } else {
      x.copy_(at::bmm(p, q).mul_(values.scale));
    }
  }
  if (values.error.defined() && !layout.groups.empty()) {
    at::Tensor work = values.work;
    work.sub_(values.flat, 1.0 / values.scale);
  }
  if (layout.rest_numel == 0) return;
  at::Tensor means = values.left.narrow(0, layout.left_numel, layout.rest_numel);
  means.div_(ranks);
  if (values.scale != 1.0) means.mul_(values.scale);
  for (const MatrixGroup& group : layout.rest_groups) {
    ranges(layout, group, values.flat).copy_(sent_ranges(layout, group, values.left));
    if (values.error.defined()) ranges(layout, group, values.work).zero_();
  }
}

void keep_queries(const LowRankLayout& layout, const LowRankValues& values,
                  const std::vector<at::Tensor>& vanished, const at::Tensor& next) {
  for (const MatrixGroup& group : layout.groups) {
    const LowRankLayout::Placed& placed = layout.placed[group.first];
    const int64_t p_numel = placed.matrix.rows * placed.matrix.rank;
    const LowRankLayout::Batch& batch = layout.batches[placed.batch];
    const int64_t first = (placed.left - batch.left) / p_numel;
    const int64_t step = group.members == 1 ? 1 : group.left_step / p_numel;
    const at::Tensor gone =
        vanished[placed.batch].slice(0, first, std::nullopt, step).narrow(0, 0, group.members);
    at::Tensor kept = right_factors(layout, group, next);
    at::where_out(kept, gone, right_factors(layout, group, values.queries),
                  right_factors(layout, group, values.right));
  }
}

}  // namespace bagua
