// The interface of a codec: bytes in, bytes out.
#pragma once

#include <cstddef>
#include <cstdint>
#include <string>

#include "base/dtype.h"

namespace bagua {

// The cudaStream_t of the caller on CUDA, null on CPU.
using StreamHandle = void*;

// Turns chunks of numbers into payloads of fewer bytes and back.
//
// A call handles `chunks` consecutive chunks of `chunk_numel` elements; chunk i reads
// x + i * chunk_numel and its payload starts at payload + i * payload_bytes(dtype, chunk_numel).
// Chunks are independent of each other.
//
// Thread safety: const and stateless; callers may split chunks over threads. Ownership: none, all
// memory is the caller's. Ordering: complete on return (CPU) or ordered on `stream` (CUDA).
// May fail: never on data; sizes and dtypes are checked by the caller. A chunk (or block) that
// holds a non-finite value decodes to non-finite values: see Note [Non-finite values] in
// chunk_format.h.
class Codec {
 public:
  virtual ~Codec() = default;

  // Bytes of the payload of one chunk. A multiple of 32, so that payloads can lie side by side.
  virtual int64_t payload_bytes(DType dtype, int64_t chunk_numel) const = 0;

  // Bytes of scratch that encode needs; 0 on CPU.
  virtual int64_t scratch_bytes(DType dtype, int64_t chunk_numel, int chunks) const = 0;

  // x: f32, f16 or bf16. payload: starts at a multiple of 4 bytes and is written in full, padding
  // included (zeros), so that equal input gives equal bytes.
  virtual void encode(const void* x, DType dtype, int64_t chunk_numel, int chunks,
                      std::byte* payload, std::byte* scratch, StreamHandle stream) const = 0;

  virtual void decode(const std::byte* payload, int chunks, void* x, DType dtype,
                      int64_t chunk_numel, StreamHandle stream) const = 0;

  // sum[i] += weight * decoded[i] for one chunk, decoded[i] being what decode would write; the
  // product and the sum are two f32 operations. `dtype` is the dtype that was encoded; the sum is
  // always f32.
  virtual void decode_add(const std::byte* payload, DType dtype, float* sum, int64_t chunk_numel,
                          float weight, StreamHandle stream) const = 0;

  // Elements that share a range: a chunk may be cut at multiples of it without changing what is
  // decoded. 0: the whole chunk is one unit (minmax_uint8). 1: element by element (casts).
  virtual int64_t block_numel() const = 0;

  // The name in the table of codecs.h.
  virtual const std::string& name() const = 0;
};

}  // namespace bagua
