// Where things lie in the payload of a chunk, for host and device alike.
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

// The payload of an 8-bit codec: a header of (minimum, maximum) pairs in the chunk's dtype, one
// pair per range, then one code byte per element; each section padded with zeros.
struct RangedLayout {
  int64_t range_numel;
  int64_t ranges;
  int64_t codes_offset;
  int64_t payload_bytes;
};

// block_numel: elements per range; 0 makes the whole chunk one range, an empty chunk included.
BAGUA_HD constexpr RangedLayout ranged_layout(int64_t block_numel, int64_t element_bytes,
                                              int64_t chunk_numel) {
  const int64_t range_numel = block_numel == 0 ? chunk_numel : block_numel;
  const int64_t ranges = block_numel == 0 ? 1 : (chunk_numel + block_numel - 1) / block_numel;
  const int64_t codes_offset = align_payload(ranges * 2 * element_bytes);
  return {range_numel, ranges, codes_offset, codes_offset + align_payload(chunk_numel)};
}

}  // namespace bagua
