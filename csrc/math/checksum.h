// The checksum of a payload, which a receiver compares on request (docs/wire-format.md, "Frames").
#pragma once

#include <cstddef>
#include <cstdint>

namespace bagua {

// bytes + the sum of w_i f_i modulo 2^64, with w_i the i-th word of 32 bits of the payload, lowest
// byte first, and f_i = 1 + (i * 0x3C6EF372 modulo 2^32). `bytes` is a multiple of 4, at most 8
// GiB; `payload` lies anywhere.
//
// The factors are odd and below 2^32, and all different, as half of the constant is odd. So it
// always finds
//   - any change of one word: the sum changes by d f_i, of which 0 < |d f_i| < 2^64;
//   - two words swapped: it changes by (w_i - w_j) (f_j - f_i), of which the same holds;
//   - two flipped bits: it changes by 2^p f_i +- 2^q f_j, both below 2^63 and, the factors being
//   odd
//     and different, equal for one and the same bit only.
// It misses one in 2^32 or less of other changes, unless they are deliberate: it is no
// signature. Factors far apart keep small changes of several words from cancelling. Additions may
// come in any order, so that any vector width and any device give the same bits.
inline constexpr uint32_t kChecksumStep = 0x3C6EF372;

uint64_t payload_checksum(const std::byte* payload, int64_t bytes);

}  // namespace bagua
