// block_uint8: the maths of minmax_uint8 with one range per block of elements.
//
// A block of floats fits the first-level cache, so that encoding reads memory once, and an outlier
// coarsens its own block only. Chunks of at most one block have the same bytes as minmax_uint8.
#pragma once

#include <cstdint>

#include "codec/codecs/minmax_uint8.h"

namespace bagua {

struct BlockUint8 : RangeUint8 {
  static constexpr int64_t kBlockNumel = 2048;
};

}  // namespace bagua
