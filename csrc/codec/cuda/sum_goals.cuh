// Goals of the kernels that sum payloads: a mean in place, or a mean with residual.
#pragma once

#include "base/device.h"
#include "codec/cuda/fused_ranges.cuh"
#include "codec/fused_codec.h"

namespace bagua {

// A goal is for one tile. Indices count the tile's elements.
//   completed(sum, i): the value to encode, as f32. x takes it in between, where it is not held.
//   put(value, decoded, i): writes the results from the encoded value and the decoded one.
// The overloads for a vector of elements, of which i is the first, need is_aligned().

// x <- decoded mean, in the dtype of x. The own version is encode(x).
template <typename T>
struct MeanInPlace {
  using Element = T;
  static constexpr bool kOwnIsEncoded = false;
  T* x;
  float divisor;

  BAGUA_DEVICE bool is_aligned() const { return bagua::is_aligned(x); }
  BAGUA_DEVICE float completed(float sum, int) const { return widen(narrow<T>(sum / divisor)); }
  BAGUA_DEVICE void put(float, T decoded, int i) const { x[i] = decoded; }

  template <int kNumel>
  BAGUA_DEVICE void complete(float (&sums)[kNumel], int i) const {
    BAGUA_UNROLL
    for (int k = 0; k < kNumel; ++k) sums[k] = completed(sums[k], i + k);
  }
  template <int kNumel>
  BAGUA_DEVICE void put(const float (&)[kNumel], const Words<4>& decoded, int i) const {
    store_words(x + i, decoded);
  }
};

// With p = mean + before: result <- decoded p, x <- p - result. The own version is the chunk's
// payload.
struct MeanWithResidual {
  using Element = float;
  static constexpr bool kOwnIsEncoded = true;
  float* x;
  const float* before;
  float* result;
  float divisor;

  BAGUA_DEVICE bool is_aligned() const {
    return bagua::is_aligned(x) && bagua::is_aligned(before) && bagua::is_aligned(result);
  }
  BAGUA_DEVICE float completed(float sum, int i) const { return sum / divisor + before[i]; }
  BAGUA_DEVICE void put(float value, float decoded, int i) const {
    result[i] = decoded;
    x[i] = lost_of(value, decoded);
  }

  BAGUA_DEVICE void complete(float (&sums)[kFloatVector], int i) const {
    const auto vector = load_words<4>(before + i);
    BAGUA_UNROLL
    for (int k = 0; k < kFloatVector; ++k) {
      sums[k] = sums[k] / divisor + element_of<float>(vector, k);
    }
  }
  BAGUA_DEVICE void put(const float (&values)[kFloatVector], const Words<4>& decoded, int i) const {
    Words<4> lost;
    BAGUA_UNROLL
    for (int k = 0; k < kFloatVector; ++k) {
      put_element(lost, k, lost_of(values[k], element_of<float>(decoded, k)));
    }
    store_words(result + i, decoded);
    store_words(x + i, lost);
  }
};

// Parameters of a kernel, from which each warp makes the goal of its tile.
template <typename T>
struct MeanInPlaceArguments {
  using Goal = MeanInPlace<T>;
  float divisor;
  BAGUA_DEVICE Goal goal(const Tile& tile) const {
    return {static_cast<T*>(tile.chunk.x) + tile.first, divisor};
  }
};

struct MeanWithResidualArguments {
  using Goal = MeanWithResidual;
  ResidualArrays arrays;
  float divisor;
  BAGUA_DEVICE Goal goal(const Tile& tile) const {
    float* const x = static_cast<float*>(tile.chunk.x) + tile.first;
    const int64_t first = x - arrays.x;
    return {x, arrays.before + first, arrays.result + first, divisor};
  }
};

// The payload of a chunk in a row, that of the own row in the chunk itself.
BAGUA_DEVICE const std::byte* payload_of(const Chunk& chunk, const PayloadVersions& versions,
                                         int row) {
  if (row == versions.own) return chunk.payload;
  return in_row(versions.first + row * versions.stride, chunk, versions.results);
}

// The decoded version of x itself, element by element.
template <typename Format, typename T>
struct OwnVersion {
  const T* x;
  RangeCoder<Format, T> coder;
  CodeBook<Format, T> book;

  BAGUA_DEVICE OwnVersion(const T* of, const RangeCoder<Format, T>& by)
      : x(of), coder(by), book(coder.header) {}
  BAGUA_DEVICE T operator[](int i) const { return book.all(coder.code(widen(x[i]))); }
};

// A range of a tile: `numel` elements from `first` on.
struct RangePlace {
  int first;
  int numel;
  int range;
};

// The sum of element i of a range over all versions, in the order of rows. `own`: the version of
// row `own`, an OwnVersion or plain elements; null where that is encoded.
template <typename Format, typename T, typename Own>
BAGUA_DEVICE float sum_of_element(const Tile& tile, const PayloadVersions& versions,
                                  const RangePlace& place, const Own* own, int i) {
  const TileSections<Format, T> sections(tile);
  float sum = 0;
  for (int row = 0; row < versions.rows; ++row) {
    if (own != nullptr && row == versions.own) {
      sum = add_weighted(sum, 1.0f, (*own)[i]);
    } else {
      const RangeReader<Format, T> version(sections, payload_of(tile.chunk, versions, row),
                                           place.first, place.numel, place.range);
      sum = add_weighted(sum, 1.0f, version[i]);
    }
  }
  return sum;
}

// Makes what is to be encoded of the sums of a range.
template <typename Map, typename Goal>
BAGUA_DEVICE void complete(RangeValues<Map>& sums, const Goal& goal, int r) {
  BAGUA_UNROLL
  for (int v = 0; v < Map::kVectors; ++v) goal.complete(sums.of[v], Map::element(r, v));
}

// Writes the codes of a range, and what the goal makes of its values and of the decoded ones.
template <typename Format, typename Map, typename Goal>
BAGUA_DEVICE void store_encoded(const RangeValues<Map>& values,
                                const RangeCoder<Format, typename Goal::Element>& coder,
                                std::byte* codes, const Goal& goal, int r) {
  using T = typename Goal::Element;
  const PackedRange<Map> packed = values.quantised(coder);
  packed.store(codes, r);
  Words<4> decoded[Map::kVectors]{};
  packed.decode(CodeBook<Format, T>(coder.header),
                [&](int v, int k, T value) { put_element(decoded[v], k, value); });
  BAGUA_UNROLL
  for (int v = 0; v < Map::kVectors; ++v) goal.put(values.of[v], decoded[v], Map::element(r, v));
}

}  // namespace bagua
