// encode_combined and decode_add_three of FusedCodec.
#pragma once

#include "base/device.h"
#include "codec/chunk_batch.h"
#include "codec/cuda/fused_ranges.cuh"
#include "codec/fused_codec.h"

namespace bagua {

BAGUA_DEVICE float combined(float x, float own, float left, float right,
                            const ThreeWeights& weights) {
  return ((x + left * weights.left) + right * weights.right) - own * weights.own;
}

// The arrays from the first element of a range on.
template <typename T>
struct CombinedValues {
  const T* x;
  const float* own;
  const float* left;
  const float* right;
  ThreeWeights weights;
  BAGUA_DEVICE float operator[](int64_t i) const {
    return combined(widen(x[i]), own[i], left[i], right[i], weights);
  }

  // Calls function(k, value) for the kFloatVector elements from `element` on; all must be aligned.
  template <typename Function>
  BAGUA_DEVICE void for_vector(int element, Function function) const {
    const auto of_x = load_words<kFloatVector * sizeof(T) / 4>(x + element);
    const auto of_own = load_words<4>(own + element);
    const auto of_left = load_words<4>(left + element);
    const auto of_right = load_words<4>(right + element);
    BAGUA_UNROLL
    for (int k = 0; k < kFloatVector; ++k) {
      function(k, combined(widen(element_of<T>(of_x, k)), element_of<float>(of_own, k),
                           element_of<float>(of_left, k), element_of<float>(of_right, k), weights));
    }
  }
};

// The arrays from an element of x on.
template <typename T>
BAGUA_DEVICE CombinedValues<T> combined_from(const ThreeArrays& arrays, const ThreeWeights& weights,
                                             int64_t first) {
  return {static_cast<const T*>(arrays.x) + first, arrays.own + first, arrays.left + first,
          arrays.right + first, weights};
}

// Element of x at which a chunk begins.
template <typename T>
BAGUA_DEVICE int64_t chunk_offset(const Chunk& chunk, const ThreeArrays& arrays) {
  return static_cast<const T*>(chunk.x) - static_cast<const T*>(arrays.x);
}

// Whether vectors of kFloatVector elements of the chunk are aligned in all of the arrays.
template <typename T>
BAGUA_DEVICE bool are_aligned(const Chunk& chunk, const ThreeArrays& arrays) {
  const int64_t offset = chunk_offset<T>(chunk, arrays);
  return reinterpret_cast<uintptr_t>(chunk.x) % (kFloatVector * sizeof(T)) == 0 &&
         is_aligned(arrays.own + offset) && is_aligned(arrays.left + offset) &&
         is_aligned(arrays.right + offset) && is_aligned(chunk.payload);
}

template <TiledFormat Format, typename T>
BAGUA_DEVICE void encode_combined_in_registers(const Tile& tile, const CombinedValues<T>& arrays) {
  using Map = TileMap<Format, float, kFloatVector>;
  const TileSections<Format, float> sections(tile);
  BAGUA_UNROLL
  for (int r = 0; r < Map::kRanges; ++r) {
    RangeValues<Map> values;
    BAGUA_UNROLL
    for (int v = 0; v < Map::kVectors; ++v) {
      arrays.for_vector(Map::element(r, v), [&](int k, float value) { values.of[v][k] = value; });
    }
    const auto coder = values.template coder<Format, float>();
    store_header<Map>(coder.header, tile.chunk.payload + sections.headers, r);
    values.quantised(coder).store(tile.chunk.payload + sections.codes, r);
  }
}

template <TiledFormat Format, typename T>
BAGUA_DEVICE void encode_combined_by_elements(const Tile& tile, CombinedValues<T> arrays) {
  const TileSections<Format, float> sections(tile);
  for_each_range_of<Format>(tile, [&](int first, int numel, int range) {
    const CombinedValues<T> values{arrays.x + first, arrays.own + first, arrays.left + first,
                                   arrays.right + first, arrays.weights};
    encode_range_of<Format, float>(values, numel, sections, tile.chunk.payload, first, range);
  });
}

// Units are tiles; a warp has one.
template <TiledFormat Format, typename T>
__global__ void __launch_bounds__(kTileThreads, kTileCtasOfSums)
    encode_combined_tiles(const __grid_constant__ ChunkBatch batch,
                          const __grid_constant__ ThreeArrays arrays, ThreeWeights weights) {
  const int64_t unit = int64_t{blockIdx.x} * kTileWarps + warp_index();
  if (unit >= batch.units()) return;
  const int index = batch.chunk_of(unit);
  const Tile tile(batch.chunks[index], unit - batch.first_unit[index]);
  const CombinedValues<T> values =
      combined_from<T>(arrays, weights, chunk_offset<T>(tile.chunk, arrays) + tile.first);
  if (tile.numel == kTileNumel && are_aligned<T>(tile.chunk, arrays)) {
    encode_combined_in_registers<Format, T>(tile, values);
  } else {
    encode_combined_by_elements<Format, T>(tile, values);
  }
  clear_padding_of<Format, float>(tile);
}

BAGUA_DEVICE bool is_finite(float value) {
  return (float_to_bits(value) & 0x7fffffff) < kFloatInfinityBits;
}

// Adds the differences to an element of each array; returns the new element of x.
template <typename T>
BAGUA_DEVICE T added(float& own, float& left, float& right, float to_own, float to_left,
                     float to_right) {
  const float of_own = own + to_own, of_left = left + to_left, of_right = right + to_right;
  const bool neighbours_are_finite = is_finite(of_left) && is_finite(of_right);
  own = is_finite(of_own) ? of_own : own;
  left = is_finite(of_left) ? of_left : left;
  right = is_finite(of_right) ? of_right : right;
  return narrow<T>(neighbours_are_finite ? of_own : bits_to_float(kFloatQuietNanBits));
}

template <typename Book>
BAGUA_DEVICE float decoded(const Book& book, typename Book::Code code, bool plain) {
  return plain ? book.plain(code) : book.all(code);
}

template <HeldFormat Format, typename T>
BAGUA_DEVICE void decode_add_three_in_registers(const Tile& tile, T* x, const ThreeArrays& from,
                                                const ThreeRows& payloads) {
  using Map = TileMap<Format, float, kFloatVector>;
  using Book = CodeBook<Format, float>;
  constexpr int kAtOnce = Map::kVectors < 4 ? Map::kVectors : 4;
  const TileSections<Format, float> sections(tile);
  const std::byte* const rows[3] = {payloads.own, payloads.left, payloads.right};
  float* const arrays[3] = {from.own, from.left, from.right};
  BAGUA_UNROLL
  for (int r = 0; r < Map::kRanges; ++r) {
    const Book books[3] = {Book(sections.header(rows[0], Map::range(r))),
                           Book(sections.header(rows[1], Map::range(r))),
                           Book(sections.header(rows[2], Map::range(r)))};
    const bool plain = books[0].is_plain() && books[1].is_plain() && books[2].is_plain();
    BAGUA_UNROLL
    for (int begin = 0; begin < Map::kVectors; begin += kAtOnce) {
      // 1. All loads.
      Words<Map::kWords> packed[3][kAtOnce];
      Words<4> vectors[3][kAtOnce];
      BAGUA_UNROLL
      for (int j = 0; j < kAtOnce; ++j) {
        BAGUA_UNROLL
        for (int a = 0; a < 3; ++a) {
          packed[a][j] = load_words<Map::kWords>(rows[a] + sections.codes +
                                                 Map::code_byte(r, Map::group_of(begin + j)));
          vectors[a][j] = load_words<4>(arrays[a] + Map::element(r, begin + j));
        }
      }
      // 2. Sums.
      BAGUA_UNROLL
      for (int j = 0; j < kAtOnce; ++j) {
        Words<kFloatVector * sizeof(T) / 4> result{};
        BAGUA_UNROLL
        for (int k = 0; k < kFloatVector; ++k) {
          float sums[3], differences[3];
          BAGUA_UNROLL
          for (int a = 0; a < 3; ++a) {
            sums[a] = element_of<float>(vectors[a][j], k);
            differences[a] = decoded(books[a], Map::get(packed[a][j], begin + j, k), plain);
          }
          put_element(
              result, k,
              added<T>(sums[0], sums[1], sums[2], differences[0], differences[1], differences[2]));
          BAGUA_UNROLL
          for (int a = 0; a < 3; ++a) put_element(vectors[a][j], k, sums[a]);
        }
        const int element = Map::element(r, begin + j);
        BAGUA_UNROLL
        for (int a = 0; a < 3; ++a) store_words(arrays[a] + element, vectors[a][j]);
        store_words(x + element, result);
      }
    }
  }
}

template <HeldFormat Format, typename T>
BAGUA_DEVICE void decode_add_three_by_elements(const Tile& tile, T* x, const ThreeArrays& arrays,
                                               const ThreeRows& payloads) {
  const TileSections<Format, float> sections(tile);
  for_each_range_of<Format>(tile, [&](int first, int numel, int range) {
    const RangeReader<Format, float> own(sections, payloads.own, first, numel, range),
        left(sections, payloads.left, first, numel, range),
        right(sections, payloads.right, first, numel, range);
    for (int i = lane_index(); i < numel; i += kWarpLanes) {
      const int at = first + i;
      x[at] =
          added<T>(arrays.own[at], arrays.left[at], arrays.right[at], own[i], left[i], right[i]);
    }
  });
}

// Units are tiles; a warp has one.
template <HeldFormat Format, typename T>
__global__ void __launch_bounds__(kTileThreads)
    decode_add_three_tiles(const __grid_constant__ ChunkBatch batch,
                           const __grid_constant__ ThreeArrays arrays,
                           const __grid_constant__ ThreeRows rows) {
  const int64_t unit = int64_t{blockIdx.x} * kTileWarps + warp_index();
  if (unit >= batch.units()) return;
  const int index = batch.chunk_of(unit);
  const Tile tile(batch.chunks[index], unit - batch.first_unit[index]);
  const int64_t offset = chunk_offset<T>(tile.chunk, arrays) + tile.first;
  T* const x = static_cast<T*>(tile.chunk.x) + tile.first;
  const ThreeArrays own{x, arrays.own + offset, arrays.left + offset, arrays.right + offset};
  const ThreeRows payloads{tile.chunk.payload, in_row(rows.left, tile.chunk, rows.own),
                           in_row(rows.right, tile.chunk, rows.own)};
  if (tile.numel == kTileNumel && are_aligned<T>(tile.chunk, arrays) && is_aligned(payloads.left) &&
      is_aligned(payloads.right)) {
    decode_add_three_in_registers<Format, T>(tile, x, own, payloads);
  } else {
    decode_add_three_by_elements<Format, T>(tile, x, own, payloads);
  }
}

// decode_add_three of FusedCodec.
template <HeldFormat Format>
void launch_decode_add_three(std::span<const Chunk> chunks, const ThreeArrays& arrays,
                             const ThreeRows& rows, DType dtype, StreamHandle stream) {
  visit_dtype(dtype, [&]<typename T>(T) {
    for_each_tile_batch(chunks, [&](const ChunkBatch& batch, int64_t grid) {
      launch("decode_add_three_tiles", decode_add_three_tiles<Format, T>, grid, kTileThreads,
             stream, batch, arrays, rows);
    });
  });
}

}  // namespace bagua
