// The fused kernels of the codecs of the table.
#pragma once

#include <memory>
#include <string>

#include "codec/fused_codec.h"

namespace bagua {

// Null if the table has no such name.
std::unique_ptr<const FusedCodec> make_fused_cuda_codec(const std::string& name);

// Null if the codec's range is not a whole chunk.
std::unique_ptr<const FusedCodec> make_fused_slice_codec(const std::string& name);

}  // namespace bagua
