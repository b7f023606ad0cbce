#include "math/low_rank_plan.h"

#include <algorithm>
#include <cstring>
#include <utility>

namespace bagua {
namespace {

void add_units(std::vector<LowRankUnit>& units, size_t item, int64_t pieces) {
  for (int64_t piece = 0; piece < pieces; ++piece) {
    units.push_back({static_cast<int32_t>(item), static_cast<int32_t>(piece)});
  }
}

template <typename Element>
void append(std::vector<std::byte>& bytes, const std::vector<Element>& elements) {
  const size_t before = bytes.size();
  bytes.resize(before + elements.size() * sizeof(Element));
  if (!elements.empty()) {
    std::memcpy(bytes.data() + before, elements.data(), elements.size() * sizeof(Element));
  }
}

}  // namespace

LowRankTable::LowRankTable(std::vector<LowRankItem> matrices, std::vector<LowRankItem> ranges) {
  std::vector<LowRankUnit> bands, tiles, queries;
  for (size_t i = 0; i < matrices.size(); ++i) {
    LowRankItem& matrix = matrices[i];
    matrix.vectors = std::exchange(vectors_, vectors_ + matrix.rank);
    matrix.partials = partials_;
    partials_ += tile_rows(matrix) * matrix.rank * matrix.columns;
    matrix_left_ = std::max(matrix_left_, matrix.left + matrix.rank * matrix.rows);
    add_units(bands, i, pieces_of(matrix.rows, band_rows(matrix)));
    add_units(tiles, i, tile_rows(matrix) * tile_columns(matrix));
    add_units(queries, i, pieces_of(matrix.rank * matrix.columns, kLowRankQueryNumel));
  }
  for (size_t i = 0; i < ranges.size(); ++i) {
    add_units(bands, matrices.size() + i, pieces_of(ranges[i].columns, kLowRankBandNumel));
  }
  counts_.item_count = static_cast<int64_t>(matrices.size() + ranges.size());
  counts_.matrices = static_cast<int64_t>(matrices.size());
  counts_.band_count = static_cast<int64_t>(bands.size());
  counts_.tile_count = static_cast<int64_t>(tiles.size());
  counts_.query_count = static_cast<int64_t>(queries.size());
  matrices.insert(matrices.end(), ranges.begin(), ranges.end());
  append(bytes_, bands);
  append(bytes_, tiles);
  append(bytes_, queries);
  append(bytes_, matrices);
}

LowRankPlan LowRankTable::at(const std::byte* copy) const {
  LowRankPlan plan = counts_;
  plan.bands = reinterpret_cast<const LowRankUnit*>(copy);
  plan.tiles = plan.bands + plan.band_count;
  plan.queries = plan.tiles + plan.tile_count;
  plan.items = reinterpret_cast<const LowRankItem*>(plan.queries + plan.query_count);
  return plan;
}

}  // namespace bagua
