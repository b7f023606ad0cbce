// Layout of a chunk's payload, for host and device alike.
// docs/wire-format.md draws the same layouts and gives the reasons.
//
// Note [Non-finite values]
// ~~~~~~~~~~~~~~~~~~~~~~~~
// A NaN or an infinity anywhere in a range makes the range's header (NaN, NaN) and its codes zero,
// and the whole range decodes to NaN. One bad gradient is therefore seen by every rank, which is
// what a loss scaler relies on to skip the step. The reverse holds too: finite values decode to
// finite values. A range as wide as float itself (max - min overflows) is scaled by halves, and
// what the grid would round past the largest finite number of the dtype stays at that number.
// Casts convert element by element: NaN stays NaN, infinity stays infinity, and a number beyond
// fp16's largest becomes infinite.
#pragma once

#include <cstdint>

#include "base/host_device.h"

namespace bagua {

// Sections and payloads start at multiples of this many bytes: any vector load is aligned, and it
// is the alignment of Bagua's own format.
constexpr int64_t kPayloadAlignment = 32;

BAGUA_HD constexpr int64_t align_payload(int64_t bytes) {
  return (bytes + kPayloadAlignment - 1) / kPayloadAlignment * kPayloadAlignment;
}

// The payload of a codec with ranges: one header per range, then the codes of all ranges; each
// section padded with zeros. The codes of a range begin at a byte, those of the next range follow
// them.
struct RangedLayout {
  int64_t range_numel;
  int64_t ranges;
  int64_t headers_bytes;
  int64_t codes_offset;
  int64_t codes_bytes;
  int64_t payload_bytes;
};

// block_numel: elements per range; 0 makes the whole chunk one range, an empty chunk included.
// bits: of a code; 1, 2, 4 or 8.
BAGUA_HD constexpr RangedLayout ranged_layout(int64_t block_numel, int64_t bits,
                                              int64_t header_bytes, int64_t chunk_numel) {
  const int64_t range_numel = block_numel == 0 ? chunk_numel : block_numel;
  const int64_t ranges = block_numel == 0 ? 1 : (chunk_numel + block_numel - 1) / block_numel;
  const int64_t headers_bytes = ranges * header_bytes;
  const int64_t codes_offset = align_payload(headers_bytes);
  const int64_t codes_bytes = (chunk_numel * bits + 7) / 8;
  return {range_numel,  ranges,      headers_bytes,
          codes_offset, codes_bytes, codes_offset + align_payload(codes_bytes)};
}

}  // namespace bagua
