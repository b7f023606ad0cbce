// The CUDA implementation of every codec of the table.
#pragma once

#include <memory>
#include <string>

#include "codec/codec.h"

namespace bagua {

// Whether this build has CUDA kernels. Whether the machine has a GPU is another question.
bool has_cuda_codecs();

// Null if the table has no such name. Throws Error if this build has no CUDA kernels.
std::shared_ptr<const Codec> make_cuda_codec(const std::string& name);

}  // namespace bagua
