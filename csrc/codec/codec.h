// The interface of a codec: bytes in, bytes out.
#pragma once

#include <cstddef>
#include <cstdint>
#include <span>
#include <string>

#include "base/dtype.h"

namespace bagua {

// The cudaStream_t of the caller on CUDA, null on CPU.
using StreamHandle = void*;

// Processor whose memory a codec reads and writes.
enum class Processor : uint8_t { kCpu, kCuda };

// Memory of a chunk: numbers and payload.
struct Chunk {
  void* x;             // first element; aligned to its type
  std::byte* payload;  // payload_bytes(dtype, numel) bytes, at a multiple of 4
  int64_t numel;
};

class FrameKernels;
class FusedCodec;

// Turns chunks of numbers into payloads of fewer bytes and back.
//
// Thread safety: const and stateless; callers may split chunks over threads. Ownership: none, all
// memory is the caller's, on the codec's processor; chunks of one call do not overlap. Ordering:
// complete on return (CPU) or ordered on `stream` (CUDA, which takes all chunks of a call at once:
// hand it as many as there are). May fail: never on data; sizes and dtypes are checked by the
// caller; Error where CUDA refuses a launch. A chunk (or block) that holds a non-finite value
// decodes to non-finite values: see Note [Non-finite values] in chunk_format.h.
class Codec {
 public:
  virtual ~Codec() = default;

  virtual Processor processor() const = 0;

  // Bytes of the payload of one chunk. A multiple of 32, so that payloads can lie side by side.
  virtual int64_t payload_bytes(DType dtype, int64_t numel) const = 0;

  // Bytes of scratch that encode needs for these chunks; 0 on CPU.
  virtual int64_t scratch_bytes(std::span<const Chunk> chunks, DType dtype) const = 0;

  // Reads x (f32, f16 or bf16) and writes the payload in full, padding included (zeros), so that
  // equal input gives equal bytes.
  virtual void encode(std::span<const Chunk> chunks, DType dtype, std::byte* scratch,
                      StreamHandle stream) const = 0;

  // Reads the payload and writes x.
  virtual void decode(std::span<const Chunk> chunks, DType dtype, StreamHandle stream) const = 0;

  // x[i] += weight * decoded[i], decoded[i] being what decode would write; the product and the sum
  // are two f32 operations. `dtype` is the dtype that was encoded; x is always float. A NaN that
  // comes of it is NaN on every processor, but its bits are the processor's own.
  virtual void decode_add(std::span<const Chunk> chunks, DType dtype, float weight,
                          StreamHandle stream) const = 0;

  // encode of float elements, after which x[i] is what its payload has lost: x[i] - decoded[i], one
  // f32 operation, with the bits of decode_add with weight -1.
  virtual void encode_residual(std::span<const Chunk> chunks, std::byte* scratch,
                               StreamHandle stream) const {
    encode(chunks, DType::kFloat32, scratch, stream);
    decode_add(chunks, DType::kFloat32, -1.0f, stream);
  }

  // Elements that share a range: a chunk may be cut at multiples of it without changing what is
  // decoded. 0: the whole chunk is one unit (minmax_uint8). 1: element by element (casts).
  virtual int64_t block_numel() const = 0;

  // The kernels that join this codec with the arithmetic around it; null where there are none, as
  // on CPU. The codec's own.
  virtual const FusedCodec* fused() const { return nullptr; }

  // The kernels of frames in front of payloads; null on CPU. They live as long as the codec.
  virtual const FrameKernels* frames() const { return nullptr; }

  // The name in the table of codecs.h.
  virtual const std::string& name() const = 0;
};

}  // namespace bagua
