// encode_sum of FusedCodec for formats whose ranges are at most a tile: one pass.
#pragma once

#include "base/device.h"
#include "codec/chunk_batch.h"
#include "codec/cuda/fused_ranges.cuh"
#include "codec/fused_codec.h"

namespace bagua {

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
  if (tile.numel == kTileNumel && are_aligned(tile.chunk, versions)) {
    encode_sum_in_registers<Format, T>(tile, versions, divisor);
  } else {
    encode_sum_by_elements<Format, T>(tile, versions, divisor);
  }
  clear_padding_of<Format, T>(tile);
}

}  // namespace bagua
