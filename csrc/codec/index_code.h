// Encoding of the indices of a sparse message (docs/wire-format.md, "Sparse messages").
#pragma once

#include <cstddef>
#include <cstdint>

namespace bagua {

enum class IndexCoding : uint8_t {
  kPacked,  // the bits that n - 1 needs for each, without gaps
  kBitmap,  // one bit for each of the n elements
};

const char* index_coding_name(IndexCoding coding);

// Bits of an index below n where they are packed, at most 32.
int64_t bits_per_index(int64_t n);

// The coding of fewest bytes, of equals the first: it follows from n and k alone, so that sizes
// agree on all ranks. 0 <= k <= n <= 2^32.
IndexCoding choose_index_coding(int64_t n, int64_t k);

// Bytes of k indices below n in that coding, padded to a multiple of kPayloadAlignment.
int64_t index_bytes(int64_t n, int64_t k);

// Writes index_bytes(n, k) bytes. `indices` are k, ascending and below n. Stateless, reentrant.
void pack_indices(const uint32_t* indices, int64_t k, int64_t n, std::byte* out);

// The reverse of pack_indices, for bytes from anywhere: whatever they are, `indices` are
// k ascending ones below n afterwards, or Error says what is wrong. Nothing is written beyond k.
void unpack_indices(const std::byte* in, int64_t k, int64_t n, uint32_t* indices);

}  // namespace bagua
