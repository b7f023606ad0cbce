// How one rank's part of a bucket is cut into the chunks that a codec encodes.
#pragma once

#include <algorithm>
#include <cstdint>
#include <limits>

#include "codec/codec.h"
#include "op/wire/frame.h"

namespace bagua {

// Elements of a piece: 512 KiB of f32, so that summing and encoding a piece stays in L2.
inline constexpr int64_t kPieceNumel = 131072;

// Pieces of a segment: about 1 MiB of 8-bit payload, the unit in which transfer, arithmetic and
// transfer back overlap.
inline constexpr int64_t kSegmentPieces = 8;

// A part of `numel` elements is a row of pieces of piece_numel() elements, the last one shorter; a
// codec whose range covers the whole chunk has one piece. A segment is up to kSegmentPieces pieces
// and travels as one message: a frame, then the payloads of its pieces, side by side. On a device a
// part is one segment: arithmetic takes it all at once, and there is nothing to overlap.
class PartLayout {
 public:
  PartLayout(const Codec& codec, DType dtype, int64_t numel)
      : numel_(numel),
        segment_pieces_(codec.processor() == Processor::kCpu ? kSegmentPieces
                                                             : std::numeric_limits<int32_t>::max()),
        piece_numel_(codec.block_numel() == 0 ? std::max<int64_t>(numel, 1) : kPieceNumel),
        piece_bytes_(codec.payload_bytes(dtype, std::min(piece_numel_, numel))),
        tail_bytes_(numel % piece_numel_ == 0 ? 0
                                              : codec.payload_bytes(dtype, numel % piece_numel_)) {}

  int64_t pieces() const { return (numel_ + piece_numel_ - 1) / piece_numel_; }
  int64_t segments() const { return (pieces() + segment_pieces_ - 1) / segment_pieces_; }
  int64_t first_piece(int64_t segment) const { return segment * segment_pieces_; }
  int64_t end_piece(int64_t segment) const {
    return std::min(pieces(), (segment + 1) * segment_pieces_);
  }

  // Range of a piece, in elements of the part.
  int64_t first(int64_t piece) const { return piece * piece_numel_; }
  int64_t numel(int64_t piece) const {
    return std::min(piece_numel_, numel_ - piece * piece_numel_);
  }

  // In bytes from the first frame of the part.
  int64_t message(int64_t segment) const {
    return segment * (kFrameBytes + segment_pieces_ * piece_bytes_);
  }
  int64_t payload(int64_t piece) const {
    const int64_t segment = piece / segment_pieces_;
    return message(segment) + kFrameBytes + piece % segment_pieces_ * piece_bytes_;
  }
  int64_t message_bytes(int64_t segment) const { return kFrameBytes + payload_bytes(segment); }
  int64_t payload_bytes(int64_t segment) const {
    const int64_t end = end_piece(segment);
    const bool has_tail = end == pieces() && tail_bytes_ > 0;
    const int64_t whole = end - first_piece(segment) - (has_tail ? 1 : 0);
    return whole * piece_bytes_ + (has_tail ? tail_bytes_ : 0);
  }
  int64_t bytes() const {
    return segments() == 0 ? 0 : message(segments() - 1) + message_bytes(segments() - 1);
  }

 private:
  int64_t numel_;
  int64_t segment_pieces_;
  int64_t piece_numel_;
  int64_t piece_bytes_;
  int64_t tail_bytes_;
};

}  // namespace bagua
