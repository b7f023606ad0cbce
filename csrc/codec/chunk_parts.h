// Steps that the CPU loops and the CUDA kernels of a chunk share.
#pragma once

#include <cstddef>
#include <cstdint>

#include "base/dtype.h"
#include "codec/chunk_format.h"

namespace bagua {

// Note [Formats]
// ~~~~~~~~~~~~~~
// A codec is a Format, a struct of constants and of the maths of one element. The loops on CPU, the
// kernels, the packing of codes and the sizes follow from it. Both kinds of formats have
//   kBits        bits of a code: 16 (casts), 8, 4 or 2 (formats with ranges)
//   kBlockNumel  elements that share a range; 0: the whole chunk; 1 for casts
// A cast has
//   Code                     what an element becomes: Half, BFloat16
//   quantise(value) -> Code  of a float
//   dequantise<T>(Code) -> T
// A format with ranges has
//   Header<T>             what is stored per range: a trivial type, padding excluded
//   Grid                  what a header says of the range
//   grid(Header<T>) -> Grid
//   dequantise<T>(code, Grid) -> T, for any header and any code: finite where the header is finite
//   quantise(value, Quantiser) -> uint8_t below 2^kBits. Quantiser is Grid, unless the format names
//                         its own. `constant` in it: all codes are zero.
// and one of two ways from values to header and quantiser. Where the order of values makes no
// difference:
//   Extent<kCount>        what is gathered of a range's values in `kCount` lanes: arrays of words
//   of
//                         32 bits, with start(lane), take(lane, value) and join(lane, other, from)
//   kLanes                lanes of the Extent for which the CPU's vectoriser does best
//   header<T>(Extent<1>)  -> Header<T>
// Where it makes one, because floats are added, or where values are looked at twice:
//   encoding<T>(values)   -> Encoding<Header<T>, Quantiser>. values.numel() is the number of
//   values,
//                         and values.collect<Statistics>(arguments...) what a template like Extent
//                         gathers, whose take() has those arguments too. In all loops and kernels
//                         element i is taken in lane i mod kSumLanes, in ascending order, and then
//                         the upper half of the lanes is joined to the lower one until one is left.
// Blocks smaller than a kernel's tile are powers of two: see cuda/block_kernels.cuh. Larger ones
// have the size of the tile, and 8 bits.
//
// Codes of less than 8 bits are split, not interleaved: in a range whose codes take `stride` bytes,
// byte j holds the codes of the elements j, j + stride, j + 2 stride, ... from the lowest bits up,
// and zeros where there is no such element. Packing is then one bitwise or of vectors.
template <typename Format>
concept RangedFormat = requires { typename Format::Grid; };
template <typename Format>
concept ExtentFormat = RangedFormat<Format> && requires { typename Format::template Extent<1>; };
template <typename Format>
concept BlockFormat = RangedFormat<Format> && (Format::kBlockNumel > 0);
template <typename Format>
concept CastFormat = requires { typename Format::Code; };

template <RangedFormat Format, typename T>
using HeaderOf = typename Format::template Header<T>;

template <RangedFormat Format>
inline constexpr int kCodesPerByte = 8 / Format::kBits;

// Lanes of sums: as many as a whole block has bytes of codes, so that a thread that has some of
// these bytes has all elements of their lanes.
template <RangedFormat Format>
  requires(!ExtentFormat<Format>)
inline constexpr int kSumLanes = static_cast<int>(Format::kBlockNumel) / kCodesPerByte<Format>;

template <typename Header, typename Quantiser>
struct Encoding {
  Header header;
  Quantiser quantiser;
};

template <RangedFormat Format>
struct QuantiserTrait {
  using Type = typename Format::Grid;
};
template <RangedFormat Format>
  requires requires { typename Format::Quantiser; }
struct QuantiserTrait<Format> {
  using Type = typename Format::Quantiser;
};
template <RangedFormat Format>
using QuantiserOf = typename QuantiserTrait<Format>::Type;

template <RangedFormat Format, typename T>
using EncodingOf = Encoding<HeaderOf<Format, T>, QuantiserOf<Format>>;

// Header and quantiser of a range, from `values` as Note [Formats] has them.
template <RangedFormat Format, typename T, typename Values>
BAGUA_HD EncodingOf<Format, T> encoding_of(const Values& values) {
  if constexpr (ExtentFormat<Format>) {
    const auto header =
        Format::template header<T>(values.template collect<Format::template Extent>());
    return {header, Format::grid(header)};
  } else {
    return Format::template encoding<T>(values);
  }
}

// Joins the upper half of the lanes to the lower one until one is left: element 0.
template <int kCount, typename Statistics>
BAGUA_HD void fold_lanes(Statistics& lanes) {
  for (int width = kCount / 2; width > 0; width /= 2) {
    for (int lane = 0; lane < width; ++lane) lanes.join(lane, lanes, lane + width);
  }
}

template <RangedFormat Format, typename T>
BAGUA_HD constexpr RangedLayout layout_of(int64_t chunk_numel) {
  static_assert(8 % Format::kBits == 0 && Format::kBlockNumel % kCodesPerByte<Format> == 0);
  return ranged_layout(Format::kBlockNumel, Format::kBits, sizeof(HeaderOf<Format, T>),
                       chunk_numel);
}

template <typename Format>
BAGUA_HD constexpr int64_t format_payload_bytes(DType dtype, int64_t chunk_numel) {
  if constexpr (RangedFormat<Format>) {
    return dtype == DType::kFloat32 ? layout_of<Format, float>(chunk_numel).payload_bytes
                                    : layout_of<Format, Half>(chunk_numel).payload_bytes;
  } else {
    return align_payload(chunk_numel * static_cast<int64_t>(sizeof(typename Format::Code)));
  }
}

// Bytes of the codes of `numel` elements of one range, and of the whole ranges before an element.
template <RangedFormat Format>
BAGUA_HD constexpr int64_t code_bytes(int64_t numel) {
  return (numel + kCodesPerByte<Format> - 1) / kCodesPerByte<Format>;
}

// Byte j of the codes of the range x[0, numel), which take `stride` bytes. x: a pointer, or what
// gives an element like one.
template <RangedFormat Format, typename Values>
BAGUA_HD uint8_t pack_codes(const Values& x, int64_t numel, int64_t stride, int64_t j,
                            QuantiserOf<Format> quantiser) {
  uint32_t byte = 0;
  for (int k = 0; k < kCodesPerByte<Format>; ++k) {
    const int64_t i = j + k * stride;
    if (i < numel)
      byte |= uint32_t{Format::quantise(widen(x[i]), quantiser)} << (k * Format::kBits);
  }
  return static_cast<uint8_t>(byte);
}

// The code of element j + k * stride, in byte j.
template <RangedFormat Format>
BAGUA_HD uint8_t unpack_code(uint32_t byte, int k) {
  constexpr uint32_t kMask = (1u << Format::kBits) - 1;
  return static_cast<uint8_t>(byte >> (k * Format::kBits) & kMask);
}

template <typename Header>
BAGUA_HD void write_header(Header header, std::byte* at) {
  __builtin_memcpy(__builtin_assume_aligned(at, alignof(Header)), &header, sizeof(header));
}

template <typename Header>
BAGUA_HD Header read_header(const std::byte* at) {
  Header header;
  __builtin_memcpy(&header, __builtin_assume_aligned(at, alignof(Header)), sizeof(header));
  return header;
}

// Adds a decoded element to a sum, as decode_add does: two f32 operations, never one.
template <typename T>
BAGUA_HD float add_weighted(float sum, float weight, T value) {
  return sum + weight * widen(value);
}

// Destination of a decoded element: it is stored, or added to a sum.
template <typename T>
struct Store {
  T* x;
  BAGUA_HD void operator()(int64_t i, T value) const { x[i] = value; }
};
template <typename T>
struct AddWeighted {
  float* x;
  float weight;
  BAGUA_HD void operator()(int64_t i, T value) const { x[i] = add_weighted(x[i], weight, value); }
};

}  // namespace bagua
