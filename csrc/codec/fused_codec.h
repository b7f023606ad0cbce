// Steps around a codec that a device does in one launch, or a few, instead of a dozen.
#pragma once

#include <cstddef>
#include <cstdint>
#include <span>

#include "base/dtype.h"
#include "codec/codec.h"

namespace bagua {

// Rows of payloads, `stride` bytes apart: each has a payload for every chunk, as far from the row's
// beginning as the chunk's own payload is from `results`.
struct PayloadVersions {
  const std::byte* results;
  const std::byte* first;  // row 0
  int64_t stride;
  int32_t rows;
  int32_t own;  // the row whose memory is not read: each function says what stands for it
};

// The divisor of a sum, and the factor of the quotient.
struct SumScale {
  float divisor;
  float factor;
};

// Three f32 arrays beside the array `x` that chunks are pieces of: element i of each belongs to
// element i of x.
struct ThreeArrays {
  const void* x;
  float* own;
  float* left;
  float* right;
};

// Two f32 arrays beside the f32 array `x` that chunks are pieces of: element i of each belongs to
// element i of x. No two of the three share memory.
struct ResidualArrays {
  const float* x;
  const float* before;
  float* result;
};

// Weights of ThreeArrays.
struct ThreeWeights {
  float own;
  float left;
  float right;
};

// Rows of payloads of the chunks, for ThreeArrays. A chunk's own payload is in row `own`; in the
// others its payload lies as far from the row's beginning.
struct ThreeRows {
  const std::byte* own;
  const std::byte* left;
  const std::byte* right;
};

// A codec's arithmetic joined with what ops do before and after it. The bits are those of the steps
// one by one, each rounded, with a Codec in between: only the bits of a NaN depend on the device.
//
// Contracts of Codec. `scratch`: scratch_bytes() of the chunks, at a multiple of 16; its contents
// mean nothing before and after.
class FusedCodec {
 public:
  virtual ~FusedCodec() = default;

  // Bytes of scratch that the functions that encode need for these chunks: 0 unless a range is a
  // whole chunk.
  virtual int64_t scratch_bytes(std::span<const Chunk> chunks, DType dtype) const = 0;

  // payload <- encode(y), x <- decode(payload), where y is the sum of the decoded payloads of all
  // rows, in the order of rows and in f32, divided by `divisor` and rounded to `dtype`. The payload
  // of row `own` is encode(x).
  virtual void encode_sum(std::span<const Chunk> chunks, const PayloadVersions& versions,
                          float divisor, DType dtype, std::byte* scratch,
                          StreamHandle stream) const = 0;

  // x <- the sum of all rows, in their order and in f32, divided and multiplied as `scale` has it,
  // each step rounded. The row `own` is x itself, the others are decoded payloads, at the places
  // that the chunks' own payloads, which are not touched, have in the row `results`.
  virtual void sum(std::span<const Chunk> chunks, const PayloadVersions& versions,
                   const SumScale& scale, DType dtype, StreamHandle stream) const = 0;

  // payload <- encode(p), result <- decode(payload), x <- p - result, where p is the sum of the
  // decoded payloads of all rows, in the order of rows, divided by `divisor`, plus `before`. All
  // are f32. The row `own` is the chunks' own payloads, unchanged.
  virtual void encode_sum_residual(std::span<const Chunk> chunks, const PayloadVersions& versions,
                                   float divisor, const ResidualArrays& arrays, std::byte* scratch,
                                   StreamHandle stream) const = 0;

  // payload <- encode(d) as f32, where d = ((x + left L) + right R) - own W in f32. `dtype` is that
  // of x.
  virtual void encode_combined(std::span<const Chunk> chunks, const ThreeArrays& arrays,
                               const ThreeWeights& weights, DType dtype, std::byte* scratch,
                               StreamHandle stream) const = 0;

  // For each of the arrays: s = array + decode(its payload, of f32); array <- s where s is finite.
  // x <- s of the own array in `dtype`; NaN where one of the others' is not finite.
  virtual void decode_add_three(std::span<const Chunk> chunks, const ThreeArrays& arrays,
                                const ThreeRows& rows, DType dtype, StreamHandle stream) const = 0;
};

}  // namespace bagua
