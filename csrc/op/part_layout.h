// How one rank's part of a bucket is cut into the chunks that a codec encodes.
#pragma once

#include <algorithm>
#include <cstdint>

#include "codec/codec.h"

namespace bagua {

// Elements of a piece: 512 KiB of f32, so that summing and encoding a piece stays in L2.
inline constexpr int64_t kPieceNumel = 131072;

// A part of `numel` elements is a row of pieces of piece_numel() elements, the last one shorter.
// A codec whose range covers the whole chunk has one piece. The bytes of a part are the payloads
// of its pieces, side by side.
class PartLayout {
 public:
  PartLayout(const Codec& codec, DType dtype, int64_t numel)
      : numel_(numel),
        piece_numel_(codec.block_numel() == 0 ? std::max<int64_t>(numel, 1) : kPieceNumel),
        piece_bytes_(codec.payload_bytes(dtype, std::min(piece_numel_, numel))),
        tail_bytes_(numel % piece_numel_ == 0
                        ? 0
                        : codec.payload_bytes(dtype, numel % piece_numel_)) {}

  int64_t pieces() const { return (numel_ + piece_numel_ - 1) / piece_numel_; }
  int64_t first(int64_t piece) const { return piece * piece_numel_; }
  int64_t numel(int64_t piece) const {
    return std::min(piece_numel_, numel_ - piece * piece_numel_);
  }
  int64_t offset(int64_t piece) const { return piece * piece_bytes_; }
  int64_t bytes() const { return numel_ / piece_numel_ * piece_bytes_ + tail_bytes_; }

 private:
  int64_t numel_;
  int64_t piece_numel_;
  int64_t piece_bytes_;
  int64_t tail_bytes_;
};

}  // namespace bagua
