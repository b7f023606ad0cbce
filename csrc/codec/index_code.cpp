#include "codec/index_code.h"

#include <bit>
#include <cstring>

#include "base/check.h"
#include "codec/chunk_format.h"

namespace bagua {
namespace {

static_assert(std::endian::native == std::endian::little);

int64_t bytes_of_bits(int64_t bits) { return (bits + 7) / 8; }

int64_t coded_bytes(IndexCoding coding, int64_t n, int64_t k) {
  return bytes_of_bits(coding == IndexCoding::kPacked ? k * bits_per_index(n) : n);
}

// The next 8 bytes, or as many as there are, as the low ones of a word.
uint64_t load(const std::byte* in, int64_t bytes) {
  uint64_t word = 0;
  if (bytes >= static_cast<int64_t>(sizeof word)) {
    std::memcpy(&word, in, sizeof word);
  } else if (bytes > 0) {  // of one element the index takes none, and `in` may be null
    std::memcpy(&word, in, bytes);
  }
  return word;
}

void write_packed(const uint32_t* indices, int64_t k, int64_t bits, std::byte* out) {
  uint64_t word = 0;  // bits that are not written yet
  int64_t held = 0;
  for (int64_t i = 0; i < k; ++i) {
    word |= uint64_t{indices[i]} << held;
    held += bits;
    if (held < 32) continue;
    std::memcpy(out, &word, sizeof(uint32_t));
    out += sizeof(uint32_t);
    word >>= 32;
    held -= 32;
  }
  std::memcpy(out, &word, bytes_of_bits(held));
}

void read_packed(const std::byte* in, int64_t k, int64_t bits, int64_t bytes, uint32_t* indices) {
  const uint64_t mask = (uint64_t{1} << bits) - 1;
  for (int64_t i = 0; i < k; ++i) {
    const int64_t bit = i * bits;  // 7 + 32 bits lie within 8 bytes
    indices[i] = static_cast<uint32_t>(load(in + bit / 8, bytes - bit / 8) >> bit % 8 & mask);
  }
}

void write_bitmap(const uint32_t* indices, int64_t k, std::byte* out) {
  for (int64_t i = 0; i < k; ++i) out[indices[i] / 8] |= std::byte{1} << indices[i] % 8;
}

// Writes up to k indices; returns how many bits are set.
int64_t read_bitmap(const std::byte* in, int64_t k, int64_t bytes, uint32_t* indices) {
  int64_t found = 0;
  for (int64_t at = 0; at < bytes; at += 8) {
    uint64_t word = load(in + at, bytes - at);
    const int64_t set = std::popcount(word);
    if (found + set <= k) {
      for (int64_t i = found; word != 0; word &= word - 1) {
        indices[i++] = static_cast<uint32_t>(8 * at + std::countr_zero(word));
      }
    }
    found += set;
  }
  return found;
}

}  // namespace

int64_t bits_per_index(int64_t n) {
  return std::bit_width(static_cast<uint64_t>(n > 0 ? n - 1 : 0));
}

const char* index_coding_name(IndexCoding coding) {
  return coding == IndexCoding::kPacked ? "packed" : "bitmap";
}

IndexCoding choose_index_coding(int64_t n, int64_t k) {
  const bool packs =
      coded_bytes(IndexCoding::kPacked, n, k) <= coded_bytes(IndexCoding::kBitmap, n, k);
  return packs ? IndexCoding::kPacked : IndexCoding::kBitmap;
}

int64_t index_bytes(int64_t n, int64_t k) {
  return align_payload(coded_bytes(choose_index_coding(n, k), n, k));
}

void pack_indices(const uint32_t* indices, int64_t k, int64_t n, std::byte* out) {
  const IndexCoding coding = choose_index_coding(n, k);
  const int64_t bytes = coded_bytes(coding, n, k), padded = index_bytes(n, k);
  if (padded == 0) return;  // out may be null
  if (coding == IndexCoding::kPacked) {
    write_packed(indices, k, bits_per_index(n), out);
  } else {
    std::memset(out, 0, bytes);
    write_bitmap(indices, k, out);
  }
  std::memset(out + bytes, 0, padded - bytes);
}

void unpack_indices(const std::byte* in, int64_t k, int64_t n, uint32_t* indices) {
  const IndexCoding coding = choose_index_coding(n, k);
  const int64_t bytes = coded_bytes(coding, n, k);
  int64_t found = k;
  if (coding == IndexCoding::kPacked) {
    read_packed(in, k, bits_per_index(n), bytes, indices);
  } else {
    found = read_bitmap(in, k, bytes, indices);
  }
  BAGUA_CHECK(found == k, "the bitmap of a sparse message marks ", found, " elements, not ", k);
  for (int64_t i = 0; i < k; ++i) {
    BAGUA_CHECK(indices[i] < n && (i == 0 || indices[i] > indices[i - 1]),
                "the indices of a sparse message (", index_coding_name(coding), ", ", k, " of ", n,
                " elements) must ascend below ", n, "; number ", i, " is ", indices[i]);
  }
}

}  // namespace bagua
