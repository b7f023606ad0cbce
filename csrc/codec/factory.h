// Codecs by name.
#pragma once

#include <memory>
#include <string>
#include <vector>

#include "codec/codec.h"

namespace bagua {

// The codec called `name`, for memory of `processor`. Throws std::invalid_argument that lists the
// names if there is none, Error if this build has no CUDA.
std::shared_ptr<const Codec> make_codec(const std::string& name,
                                        Processor processor = Processor::kCpu);

// The names in the order of the table in codecs.h.
std::vector<std::string> codec_names();

}  // namespace bagua
