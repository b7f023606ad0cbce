#include "op/tensors/low_rank_layout.h"

#include <algorithm>
#include <map>
#include <utility>

#include "base/check.h"

namespace bagua {

LowRankLayout::LowRankLayout(int64_t bucket_numel, const std::vector<LowRankMatrix>& of_bucket)
    : numel(bucket_numel) {
  std::map<std::pair<int64_t, int64_t>, std::vector<size_t>> by_shape;
  int64_t end = 0;
  for (const LowRankMatrix& m : of_bucket) {
    BAGUA_CHECK_ARG(
        m.offset >= end && m.rows > 0 && m.columns > 0 && m.offset + m.rows * m.columns <= numel,
        "LowRank: a matrix of ", m.rows, " x ", m.columns, " at ", m.offset,
        " overlaps the one before or the end of the bucket at ", numel, ".");
    BAGUA_CHECK_ARG(m.rank >= 1 && m.rank <= std::min(m.rows, m.columns), "LowRank: rank ", m.rank,
                    " of a matrix of ", m.rows, " x ", m.columns,
                    " must be between 1 and the smaller of both.");
    add_rest(end, m.offset);
    end = m.offset + m.rows * m.columns;
    by_shape[{m.rows, m.rank}].push_back(matrices.size());
    matrices.push_back({.offset = m.offset,
                        .rows = m.rows,
                        .columns = m.columns,
                        .rank = m.rank,
                        .right = std::exchange(right_numel, right_numel + m.columns * m.rank)});
  }
  add_rest(end, numel);
  for (auto& [shape, members] : by_shape) {
    const auto [rows, rank] = shape;
    const int64_t first = left_numel;
    for (size_t i : members) {
      matrices[i].left = std::exchange(left_numel, left_numel + rows * rank);
    }
    batches.push_back({first, rows, rank, std::move(members)});
  }
  for (LowRankItem& range : rest) range.left += left_numel;
}

void LowRankLayout::add_rest(int64_t begin, int64_t end) {
  if (end <= begin) return;
  rest.push_back({.offset = begin, .rows = 1, .columns = end - begin, .left = rest_numel});
  rest_numel += end - begin;
}

}  // namespace bagua
