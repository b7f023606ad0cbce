// The work of low-rank kernels on a bucket, cut into units of one CTA each.
#pragma once

#include <cstddef>
#include <cstdint>
#include <vector>

#include "base/host_device.h"

namespace bagua {

// A matrix of a bucket, row after row, or a range of non-matrix elements: one row of rank 0.
// Places are elements from the start of the bucket, of the messages and of the scratch.
struct LowRankItem {
  int64_t offset = 0;
  int64_t rows = 0;
  int64_t columns = 0;
  int64_t rank = 0;
  int64_t left = 0;      // P, or the range, in the first message
  int64_t right = 0;     // Q in the second one
  int64_t vectors = 0;   // vectors of P of all matrices before
  int64_t partials = 0;  // sums of parts of Q
};

// Piece `piece` of item `item`.
struct LowRankUnit {
  int32_t item;
  int32_t piece;
};

// A band: as many whole rows of a matrix as have about this many elements, or this many elements of
// a range.
constexpr int64_t kLowRankBandNumel = 4096;
// A tile of a matrix.
constexpr int64_t kLowRankTileRows = 128;
constexpr int64_t kLowRankTileColumns = 32;
// A piece of the elements of a Q.
constexpr int64_t kLowRankQueryNumel = 256;

BAGUA_HD int64_t pieces_of(int64_t numel, int64_t each) { return (numel + each - 1) / each; }

BAGUA_HD int64_t band_rows(const LowRankItem& matrix) {
  const int64_t rows = kLowRankBandNumel / matrix.columns;
  return rows > 1 ? rows : 1;
}
BAGUA_HD int64_t tile_rows(const LowRankItem& matrix) {
  return pieces_of(matrix.rows, kLowRankTileRows);
}
BAGUA_HD int64_t tile_columns(const LowRankItem& matrix) {
  return pieces_of(matrix.columns, kLowRankTileColumns);
}

// Pointers to a table, on the device that has it.
struct LowRankPlan {
  const LowRankItem* items;  // matrices, then ranges
  const LowRankUnit* bands;  // of all items
  const LowRankUnit* tiles;
  const LowRankUnit* queries;  // pieces of all Q
  int64_t item_count;
  int64_t matrices;
  int64_t band_count;
  int64_t tile_count;
  int64_t query_count;
};

// Items and units in one block of memory, to be copied to a device.
//
// Thread safety: const after construction. Ownership: of the block.
class LowRankTable {
 public:
  // Items have their places, but for `vectors` and `partials`.
  LowRankTable(std::vector<LowRankItem> matrices, std::vector<LowRankItem> ranges);

  const std::vector<std::byte>& bytes() const { return bytes_; }
  // The plan of a copy of bytes(), at a multiple of 8.
  LowRankPlan at(const std::byte* copy) const;

  int64_t vectors() const { return vectors_; }              // of all P
  int64_t partials() const { return partials_; }            // elements
  int64_t matrix_elements() const { return matrix_left_; }  // of all P

 private:
  std::vector<std::byte> bytes_;
  LowRankPlan counts_{};
  int64_t vectors_ = 0;
  int64_t partials_ = 0;
  int64_t matrix_left_ = 0;
};

}  // namespace bagua
