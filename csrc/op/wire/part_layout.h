// How a payload is cut into the tiles that a codec encodes, and into messages.
#pragma once

#include <algorithm>
#include <cstdint>
#include <limits>
#include <string>

#include "codec/codec.h"
#include "op/wire/frame.h"

namespace bagua {

// Elements of a tile: 512 KiB of f32, so that summing and encoding a tile stays in L2.
inline constexpr int64_t kTileNumel = 131072;

// Tiles of a segment: about 1 MiB of 8-bit payload, the unit in which transfer, arithmetic and
// transfer back overlap.
inline constexpr int64_t kSegmentTiles = 8;

// A part of `numel` elements is a row of tiles of kTileNumel elements, the last one shorter; a
// codec whose range covers the whole chunk has one tile. A segment is up to kSegmentTiles tiles and
// travels as one message: a frame, then the payloads of its tiles, side by side. On a device a part
// is one segment: arithmetic takes it all at once, and there is nothing to overlap.
class PartLayout {
 public:
  // The codec must live as long as the layout.
  PartLayout(const Codec& codec, DType dtype, int64_t numel)
      : codec_(&codec),
        dtype_(dtype),
        numel_(numel),
        segment_tiles_(codec.processor() == Processor::kCpu ? kSegmentTiles
                                                            : std::numeric_limits<int32_t>::max()),
        tile_numel_(codec.block_numel() == 0 ? std::max<int64_t>(numel, 1) : kTileNumel),
        tile_bytes_(codec.payload_bytes(dtype, std::min(tile_numel_, numel))),
        tail_bytes_(numel % tile_numel_ == 0 ? 0
                                             : codec.payload_bytes(dtype, numel % tile_numel_)) {}

  int64_t numel() const { return numel_; }
  int64_t tiles() const { return (numel_ + tile_numel_ - 1) / tile_numel_; }
  int64_t segments() const { return (tiles() + segment_tiles_ - 1) / segment_tiles_; }
  int64_t first_tile(int64_t segment) const { return segment * segment_tiles_; }
  int64_t end_tile(int64_t segment) const {
    return std::min(tiles(), (segment + 1) * segment_tiles_);
  }

  // First element of a tile, and the elements of tiles [first, end).
  int64_t first_element(int64_t tile) const { return tile * tile_numel_; }
  int64_t numel(int64_t first, int64_t end) const {
    return std::min(numel_, end * tile_numel_) - first * tile_numel_;
  }

  // In bytes from the first frame of the part.
  int64_t message_offset(int64_t segment) const {
    return segment * (kFrameBytes + segment_tiles_ * tile_bytes_);
  }
  int64_t payload_offset(int64_t tile) const {
    const int64_t segment = tile / segment_tiles_;
    return message_offset(segment) + kFrameBytes + tile % segment_tiles_ * tile_bytes_;
  }
  int64_t message_bytes(int64_t segment) const { return kFrameBytes + payload_bytes(segment); }
  int64_t payload_bytes(int64_t segment) const {
    const int64_t end = end_tile(segment);
    const bool has_tail = end == tiles() && tail_bytes_ > 0;
    const int64_t whole = end - first_tile(segment) - (has_tail ? 1 : 0);
    return whole * tile_bytes_ + (has_tail ? tail_bytes_ : 0);
  }
  int64_t bytes() const {
    return segments() == 0 ? 0 : message_offset(segments() - 1) + message_bytes(segments() - 1);
  }

  // The frame in front of a segment: equal on both ends if they encode alike.
  Frame frame(int64_t segment, uint64_t round, const std::string& bucket, Checksum checksum) const {
    return {frame_fingerprint(codec_->name(), static_cast<int>(dtype_), numel_, segment, bucket),
            round, static_cast<uint64_t>(payload_bytes(segment)), checksum};
  }

 private:
  const Codec* codec_;
  DType dtype_;
  int64_t numel_;
  int64_t segment_tiles_;
  int64_t tile_numel_;
  int64_t tile_bytes_;
  int64_t tail_bytes_;
};

}  // namespace bagua
