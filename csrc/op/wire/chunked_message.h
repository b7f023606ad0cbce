// The payload of a chunked sparse message: the largest elements of each chunk of a bucket, in few
// bits.
#pragma once

#include <cstddef>
#include <cstdint>
#include <string>

#include "op/wire/frame.h"

namespace bagua {

// Elements of a chunk; the last one of a bucket may be shorter.
inline constexpr int64_t kSparseChunkNumel = 4096;

// Where things lie in the message of a bucket of `numel` elements of which each chunk sends `k`, a
// shorter one as large a part of it, rounded up (docs/wire-format.md, "Chunked sparse messages").
// Sizes follow from the arguments alone. In host memory.
//
// Thread safety: const and stateless; calls for different chunks may run side by side.
class ChunkedMessage {
 public:
  // Throws std::invalid_argument unless 1 <= k <= kSparseChunkNumel.
  ChunkedMessage(int64_t numel, int64_t k);

  int64_t chunks() const { return chunks_; }
  // With the frame in front; for no elements the frame alone.
  int64_t bytes() const { return bytes_; }

  // Writes chunk `number` of the bucket x into the message, and leaves in x what that loses: of
  // elements that are not sent all, of others the difference to what they decode to. Of equal
  // magnitudes the first is sent; NaN counts as the largest. T: float or double, sent as float.
  template <typename T>
  void take(int64_t number, T* x, std::byte* message) const;
  // Zeros between the sections, so that equal input gives equal bytes.
  void write_padding(std::byte* message) const;

  // sum += what chunk `number` of the message decodes to. Throws Error where the bytes are none
  // that take() has written: then nothing is added, and nothing is written outside of that chunk.
  template <typename T>
  void add(int64_t number, const std::byte* message, T* sum) const;

 private:
  struct Place {
    int64_t first;  // element
    int64_t numel;
    int64_t k;
    int64_t headers;  // bytes from the start of the message
    int64_t codes;
    int64_t indices;
  };

  Place place(int64_t number) const;

  int64_t numel_;
  int64_t k_;
  int64_t chunks_;
  int64_t headers_end_;  // before its padding, as the next
  int64_t codes_;
  int64_t codes_end_;
  int64_t indices_;
  int64_t bytes_;
};

extern template void ChunkedMessage::take<float>(int64_t, float*, std::byte*) const;
extern template void ChunkedMessage::take<double>(int64_t, double*, std::byte*) const;
extern template void ChunkedMessage::add<float>(int64_t, const std::byte*, float*) const;
extern template void ChunkedMessage::add<double>(int64_t, const std::byte*, double*) const;

}  // namespace bagua
