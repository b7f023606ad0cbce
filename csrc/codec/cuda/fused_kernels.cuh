// Kernels of FusedCodec. A warp has a tile: in registers where the tile is whole and everything is
// aligned, else element by element.
#pragma once

#include "base/device.h"
#include "codec/chunk_batch.h"
#include "codec/cuda/encode_kernels.cuh"
#include "codec/cuda/held_tile.cuh"
#include "codec/fused_codec.h"

namespace bagua {

// CTAs per multiprocessor that leave a lane the registers for its share of a tile and for what is
// added to it: one row of payloads, or as many vectors of four arrays as the compiler loads ahead.
// With 3 some formats spill.
constexpr int kTileCtasOfSums = 2;

// Elements of x and f32 elements in one vector of a lane.
template <typename T>
inline constexpr int kOwnVector = kVectorBytes / sizeof(T);
constexpr int kFloatVector = kVectorBytes / sizeof(float);

// Where a chunk's payload lies in another row than the one that begins at `own_row`.
BAGUA_DEVICE const std::byte* in_row(const std::byte* row, const Chunk& chunk,
                                     const std::byte* own_row) {
  return row + (chunk.payload - own_row);
}

// Calls function(first, numel, range) for the ranges of a tile, one after the other; for a cast
// once.
template <TiledFormat Format, typename Function>
BAGUA_DEVICE void for_each_range_of(const Tile& tile, Function function) {
  constexpr int kRangeNumel =
      RangedFormat<Format> ? static_cast<int>(Format::kBlockNumel) : kTileNumel;
  for (int first = 0; first < tile.numel; first += kRangeNumel) {
    const int left = tile.numel - first;
    function(first, left < kRangeNumel ? left : kRangeNumel, first / kRangeNumel);
  }
}

// One range of a payload, element by element. T: what was encoded.
template <TiledFormat Format, typename T>
struct RangeReader {
  using Book = CodeBook<Format, T>;
  const std::byte* codes;
  int stride;
  Book book;

  BAGUA_DEVICE RangeReader(const TileSections<Format, T>& sections, const std::byte* payload,
                           int first, int numel, int range)
      : codes(codes_at(sections, payload, first)),
        stride(stride_of(numel)),
        book(sections.header(payload, range)) {}

  BAGUA_DEVICE static int stride_of(int numel) {
    if constexpr (RangedFormat<Format>) return static_cast<int>(code_bytes<Format>(numel));
    return numel;
  }
  template <typename Byte>
  BAGUA_DEVICE static Byte* codes_at(const TileSections<Format, T>& sections, Byte* payload,
                                     int first) {
    if constexpr (RangedFormat<Format>) {
      return payload + sections.codes + first / kCodesPerByte<Format>;
    } else {
      return payload + sections.codes + first * static_cast<int>(sizeof(typename Book::Code));
    }
  }

  BAGUA_DEVICE T operator[](int i) const {
    if constexpr (RangedFormat<Format>) {
      const auto byte = static_cast<uint32_t>(codes[i % stride]);
      return book.all(unpack_code<Format>(byte, i / stride));
    } else {
      return book.all(reinterpret_cast<const typename Book::Code*>(codes)[i]);
    }
  }
};

// Encodes a range of any size or alignment, x[i] each; by all lanes of the warp.
template <TiledFormat Format, typename T, typename Values>
BAGUA_DEVICE void encode_range_of(const Values& x, int numel,
                                  const TileSections<Format, T>& sections, std::byte* payload,
                                  int first, int range) {
  std::byte* const codes = RangeReader<Format, T>::codes_at(sections, payload, first);
  if constexpr (RangedFormat<Format>) {
    std::byte* const header = payload + sections.headers + range * sizeof(HeaderOf<Format, T>);
    encode_block<Format, T>(x, numel, header, reinterpret_cast<uint8_t*>(codes));
  } else {
    using Code = typename Format::Code;
    for (int i = lane_index(); i < numel; i += kWarpLanes) {
      reinterpret_cast<Code*>(codes)[i] = Format::quantise(widen(x[i]));
    }
  }
}

// ---- encode_sum ----

// The decoded version of x itself, element by element.
template <typename Format, typename T>
struct OwnVersion {
  const T* x;
  RangeCoder<Format, T> coder;
  CodeBook<Format, T> book;

  // By all lanes of the warp.
  BAGUA_DEVICE OwnVersion(const T* of, int numel)
      : x(of),
        coder(coder_of<Format, T>(ElementValues<Format, const T*>{x, numel})),
        book(coder.header) {}
  BAGUA_DEVICE T operator[](int i) const { return book.all(coder.code(widen(x[i]))); }
};

template <TiledFormat Format, typename T>
BAGUA_DEVICE void encode_sum_by_elements(const Tile& tile, const PayloadVersions& versions,
                                         float divisor) {
  const TileSections<Format, T> sections(tile);
  const auto sum_range = [&](int first, int numel, int range) {
    T* const x = static_cast<T*>(tile.chunk.x) + tile.first + first;
    const OwnVersion<Format, T> own(x, numel);
    for (int i = lane_index(); i < numel; i += kWarpLanes) {
      float sum = 0;
      for (int row = 0; row < versions.rows; ++row) {
        if (row == versions.own) {
          sum = add_weighted(sum, 1.0f, own[i]);
        } else {
          const std::byte* const payload =
              in_row(versions.first + row * versions.stride, tile.chunk, versions.results);
          const RangeReader<Format, T> version(sections, payload, first, numel, range);
          sum = add_weighted(sum, 1.0f, version[i]);
        }
      }
      x[i] = narrow<T>(sum / divisor);
    }
    __syncwarp();  // lanes read what others have written
    encode_range_of<Format, T>(x, numel, sections, tile.chunk.payload, first, range);
    __syncwarp();
    const RangeReader<Format, T> result(sections, tile.chunk.payload, first, numel, range);
    for (int i = lane_index(); i < numel; i += kWarpLanes) x[i] = result[i];
  };
  for_each_range_of<Format>(tile, sum_range);
}

template <TiledFormat Format, typename T>
BAGUA_DEVICE void encode_sum_in_registers(const Tile& tile, const PayloadVersions& versions,
                                          float divisor) {
  using Map = TileMap<Format, T, kOwnVector<T>>;
  using Book = CodeBook<Format, T>;
  const TileSections<Format, T> sections(tile);
  T* const x = static_cast<T*>(tile.chunk.x) + tile.first;
  RangeValues<Map> sums[Map::kRanges]{};

  // 1. The versions, in the order of rows.
  for (int row = 0; row < versions.rows; ++row) {
    const std::byte* const payload =
        in_row(versions.first + row * versions.stride, tile.chunk, versions.results);
    PackedRange<Map> packed[Map::kRanges];
    typename Book::Header headers[Map::kRanges];
    BAGUA_UNROLL
    for (int r = 0; r < Map::kRanges; ++r) {
      if (row == versions.own) {
        const auto coder = RangeValues<Map>::load(x, r).template coder<Format, T>();
        __syncwarp();  // or the values would be held, not loaded again, and fill the registers
        packed[r] = RangeValues<Map>::load(x, r).quantised(coder);
        headers[r] = coder.header;
      } else {
        packed[r] = PackedRange<Map>::load(payload + sections.codes, r);
        headers[r] = sections.header(payload, Map::range(r));
      }
    }
    BAGUA_UNROLL
    for (int r = 0; r < Map::kRanges; ++r) {
      packed[r].decode(Book(headers[r]), [&](int v, int k, T value) {
        sums[r].of[v][k] = add_weighted(sums[r].of[v][k], 1.0f, value);
      });
    }
  }

  // 2. The mean in the dtype of x, its payload, and what that decodes to.
  BAGUA_UNROLL
  for (int r = 0; r < Map::kRanges; ++r) {
    BAGUA_UNROLL
    for (int v = 0; v < Map::kVectors; ++v) {
      BAGUA_UNROLL
      for (int k = 0; k < Map::kNumel; ++k) {
        sums[r].of[v][k] = widen(narrow<T>(sums[r].of[v][k] / divisor));
      }
    }
    const auto coder = sums[r].template coder<Format, T>();
    const Book book(coder.header);
    const PackedRange<Map> packed = sums[r].quantised(coder);
    store_header<Map>(coder.header, tile.chunk.payload + sections.headers, r);
    packed.store(tile.chunk.payload + sections.codes, r);
    Words<4> vectors[Map::kVectors]{};
    packed.decode(book, [&](int v, int k, T value) { put_element(vectors[v], k, value); });
    BAGUA_UNROLL
    for (int v = 0; v < Map::kVectors; ++v) store_words(x + Map::element(r, v), vectors[v]);
  }
}

// Units are tiles; a warp has one.
template <TiledFormat Format, typename T>
__global__ void __launch_bounds__(kTileThreads, kTileCtasOfSums)
    encode_sum_tiles(const __grid_constant__ ChunkBatch batch,
                     const __grid_constant__ PayloadVersions versions, float divisor) {
  const int64_t unit = int64_t{blockIdx.x} * kTileWarps + warp_index();
  if (unit >= batch.units()) return;
  const int index = batch.chunk_of(unit);
  const Tile tile(batch.chunks[index], unit - batch.first_unit[index]);
  const bool aligned = is_aligned(tile.chunk.x) && is_aligned(tile.chunk.payload) &&
                       is_aligned(in_row(versions.first, tile.chunk, versions.results)) &&
                       versions.stride % kVectorBytes == 0;
  if (aligned && tile.numel == kTileNumel) {
    encode_sum_in_registers<Format, T>(tile, versions, divisor);
  } else {
    encode_sum_by_elements<Format, T>(tile, versions, divisor);
  }
  clear_padding_of<Format, T>(tile);
}

// ---- encode_combined ----

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
};

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
      const int element = Map::element(r, v);
      const auto x = load_words<kFloatVector * sizeof(T) / 4>(arrays.x + element);
      const auto own = load_words<4>(arrays.own + element);
      const auto left = load_words<4>(arrays.left + element);
      const auto right = load_words<4>(arrays.right + element);
      BAGUA_UNROLL
      for (int k = 0; k < kFloatVector; ++k) {
        values.of[v][k] =
            combined(widen(element_of<T>(x, k)), element_of<float>(own, k),
                     element_of<float>(left, k), element_of<float>(right, k), arrays.weights);
      }
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
  const int64_t offset = chunk_offset<T>(tile.chunk, arrays) + tile.first;
  const CombinedValues<T> values{static_cast<const T*>(arrays.x) + offset, arrays.own + offset,
                                 arrays.left + offset, arrays.right + offset, weights};
  if (tile.numel == kTileNumel && are_aligned<T>(tile.chunk, arrays)) {
    encode_combined_in_registers<Format, T>(tile, values);
  } else {
    encode_combined_by_elements<Format, T>(tile, values);
  }
  clear_padding_of<Format, float>(tile);
}

// ---- decode_add_three ----

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

template <TiledFormat Format, typename T>
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

template <TiledFormat Format, typename T>
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
template <TiledFormat Format, typename T>
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

}  // namespace bagua
