// Sums of rows of elements that no codec has encoded.
#pragma once

#include <memory>
#include <span>

#include "codec/fused_codec.h"

namespace bagua {

// FusedCodec::sum where payloads are the elements themselves. Rows may begin at any element.
//
// Contracts of Codec.
class PlainSum {
 public:
  virtual ~PlainSum() = default;

  virtual void sum(std::span<const Chunk> chunks, const PayloadVersions& versions,
                   const SumScale& scale, DType dtype, StreamHandle stream) const = 0;
};

// Null if this build has no CUDA kernels.
std::shared_ptr<const PlainSum> make_cuda_plain_sum();

}  // namespace bagua
