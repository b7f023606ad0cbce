#include "op/tensors/low_rank_layout.h"

#include <algorithm>
#include <limits>
#include <map>
#include <tuple>
#include <utility>

#include "base/check.h"

namespace bagua {
namespace {

// Where a member of a group lies.
struct Member {
  size_t position;
  int64_t offset;
  int64_t left;
  int64_t right;
};

// Adds a member to the last group of its shape, if that keeps its distances, or to a new one.
void add_member(std::vector<LowRankLayout::Group>& groups, std::vector<Member>& last,
                size_t& of_shape, const Member& member) {
  if (of_shape != groups.size()) {
    LowRankLayout::Group& group = groups[of_shape];
    const Member& before = last[of_shape];
    const int64_t offset = member.offset - before.offset, left = member.left - before.left,
                  right = member.right - before.right;
    const bool equal =
        group.offset_step == offset && group.left_step == left && group.right_step == right;
    if (group.members == 1 || equal) {
      group.offset_step = offset;
      group.left_step = left;
      group.right_step = right;
      ++group.members;
      last[of_shape] = member;
      return;
    }
  }
  of_shape = groups.size();
  groups.push_back({member.position, 1, 0, 0, 0});
  last.push_back(member);
}

}  // namespace

LowRankLayout::LowRankLayout(int64_t bucket_numel, const std::vector<LowRankMatrix>& matrices)
    : numel(bucket_numel) {
  std::map<std::pair<int64_t, int64_t>, std::vector<size_t>> by_shape;
  int64_t end = 0;
  for (const LowRankMatrix& m : matrices) {
    BAGUA_CHECK_ARG(
        m.offset >= end && m.rows > 0 && m.columns > 0 && m.offset + m.rows * m.columns <= numel,
        "LowRank: a matrix of ", m.rows, " x ", m.columns, " at ", m.offset,
        " overlaps the one before or the end of the bucket at ", numel, ".");
    BAGUA_CHECK_ARG(m.rank >= 1 && m.rank <= std::min(m.rows, m.columns), "LowRank: rank ", m.rank,
                    " of a matrix of ", m.rows, " x ", m.columns,
                    " must be between 1 and the smaller of both.");
    add_rest(end, m.offset);
    end = m.offset + m.rows * m.columns;
    by_shape[{m.rows, m.rank}].push_back(placed.size());
    placed.push_back({m, 0, right_numel, 0});
    right_numel += m.columns * m.rank;
  }
  add_rest(end, numel);
  for (auto& [shape, members] : by_shape) {
    const auto [rows, rank] = shape;
    const int64_t first = left_numel;
    for (size_t i : members) {
      placed[i].left = left_numel;
      placed[i].batch = batches.size();
      left_numel += rows * rank;
    }
    batches.push_back({first, rows, rank, std::move(members)});
  }
  group();
}

void LowRankLayout::group() {
  constexpr size_t kNone = std::numeric_limits<size_t>::max();
  std::map<std::tuple<int64_t, int64_t, int64_t>, size_t> of_shape;
  std::vector<Member> last;
  for (size_t i = 0; i < placed.size(); ++i) {
    const LowRankMatrix& m = placed[i].matrix;
    size_t& known = of_shape.try_emplace({m.rows, m.columns, m.rank}, kNone).first->second;
    if (known == kNone) known = groups.size();
    add_member(groups, last, known, {i, m.offset, placed[i].left, placed[i].right});
  }
  std::map<int64_t, size_t> of_length;
  last.clear();
  int64_t left = left_numel;
  for (size_t i = 0; i < rest.size(); ++i) {
    size_t& known = of_length.try_emplace(rest[i].numel, kNone).first->second;
    if (known == kNone) known = rest_groups.size();
    add_member(rest_groups, last, known, {i, rest[i].offset, left, 0});
    rest_left.push_back(left);
    left += rest[i].numel;
  }
}

void LowRankLayout::add_rest(int64_t begin, int64_t end) {
  if (end <= begin) return;
  rest.push_back({begin, end - begin});
  rest_numel += end - begin;
}

}  // namespace bagua
