// The interface of a codec of sparse messages on a device.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>

#include "codec/codec.h"
#include "codec/frame_kernels.h"
#include "codec/index_code.h"

namespace bagua {

// A message of the k largest of `numel` elements: their values, then their coded indices, each
// padded with zeros to a multiple of kPayloadAlignment (docs/wire-format.md, "Sparse messages").
struct SparseShape {
  int64_t numel;
  int64_t k;              // 1 to numel
  int64_t element_bytes;  // 4 or 8: float or double
  IndexCoding coding;
  int bits;  // of an index, where they are packed
  int64_t values_bytes;
  int64_t indices_bytes;
};

// Messages of several ranks, one behind the other.
struct SparseMessages {
  const std::byte* first;  // values of rank 0
  int64_t stride;          // bytes from a message to the next
  int64_t ranks;
};

// Thread safety: const and stateless. Ownership: none, all memory is the caller's, on the device.
// Ordering: on `stream`. May fail: Error where CUDA refuses a launch.
class SparseCodec {
 public:
  virtual ~SparseCodec() = default;

  // Bytes that take() and add() of messages of `ranks` ranks work in, at a multiple of 8.
  virtual int64_t scratch_bytes(const SparseShape& shape, int64_t ranks) const = 0;

  // Writes the elements that top_k (math/top_k.h) chooses of x to `message`, and zeros in their
  // place.
  virtual void take(const SparseShape& shape, void* x, std::byte* message, std::byte* scratch,
                    StreamHandle stream) const = 0;

  // sum = the values of all ranks, added in order of ranks, and zeros elsewhere. faults[r]: how
  // many of rank r's indices are not as take() writes them; if any, the sum is NaN everywhere.
  virtual void add(const SparseShape& shape, const SparseMessages& messages, void* sum,
                   int32_t* faults, std::byte* scratch, StreamHandle stream) const = 0;

  // The kernels of frames in front of messages. They live as long as the codec.
  virtual const FrameKernels& frames() const = 0;
};

// With CUDA kernels. Throws Error where the build has none.
std::shared_ptr<const SparseCodec> make_cuda_sparse_codec();

}  // namespace bagua
