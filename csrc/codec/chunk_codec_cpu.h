// The CPU implementation of every codec of the table.
#pragma once

#include <memory>
#include <string>

#include "codec/codec.h"

namespace bagua {

// Null if the table has no such name.
std::shared_ptr<const Codec> make_cpu_codec(const std::string& name);

}  // namespace bagua
