// The table of codecs. A codec is one line here and one header of per-element maths, a format (Note
// [Formats] in chunk_parts.h); its loops, kernels, name in Python, tests and benchmark follow.
#pragma once

#include <tuple>

#include "codec/codecs/bit2_block.h"
#include "codec/codecs/block_uint8.h"
#include "codec/codecs/cast_bf16.h"
#include "codec/codecs/cast_fp16.h"
#include "codec/codecs/int4_block.h"
#include "codec/codecs/minmax_uint8.h"

namespace bagua {

template <typename FormatType>
struct CodecLine {
  using Format = FormatType;
  const char* name;
};

inline constexpr std::tuple kCodecs{
    CodecLine<MinmaxUint8>{"minmax_uint8"},  // one range per chunk: Bagua's MinMaxUInt8
    CodecLine<BlockUint8>{"block_uint8"},    // one range per block: the default for 8 bit
    CodecLine<CastFp16>{"fp16"},
    CodecLine<CastBf16>{"bf16"},
    CodecLine<Int4Block>{"int4_block"},
    CodecLine<Bit2Block>{"bit2_block"},
};

// Calls function(line) for every line, in the table's order.
template <typename Function>
void for_each_codec(Function&& function) {
  std::apply([&](const auto&... lines) { (function(lines), ...); }, kCodecs);
}

}  // namespace bagua
