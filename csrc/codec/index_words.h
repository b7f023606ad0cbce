// Coded indices (codec/index_code.h) word by word, for kernels, where a thread has one of them.
#pragma once

#include <cstdint>

#include "base/host_device.h"
#include "codec/index_code.h"

namespace bagua {

// Position of the first of k ascending indices that is not below `bound`.
BAGUA_HD int64_t first_from(const uint32_t* indices, int64_t k, int64_t bound) {
  int64_t low = 0, high = k;
  while (low < high) {
    const int64_t middle = low + (high - low) / 2;
    if (static_cast<int64_t>(indices[middle]) < bound) {
      low = middle + 1;
    } else {
      high = middle;
    }
  }
  return low;
}

// Word `word`, of 32 bits, of k coded indices; `bits`: of one index, where they are packed. Words
// behind the last index are 0.
BAGUA_HD uint32_t coded_word(IndexCoding coding, const uint32_t* indices, int64_t k, int bits,
                             int64_t word) {
  uint64_t result = 0;
  const int64_t first = 32 * word;
  if (coding == IndexCoding::kBitmap) {
    for (int64_t i = first_from(indices, k, first); i < k && indices[i] < first + 32; ++i) {
      result |= uint64_t{1} << (indices[i] - first);
    }
    return static_cast<uint32_t>(result);
  }
  if (bits == 0) return 0;
  for (int64_t i = first / bits; i < k && i * bits < first + 32; ++i) {
    const int64_t shift = i * bits - first;  // negative: its low bits are in the word before
    const uint64_t index = indices[i];
    result |= shift < 0 ? index >> -shift : index << shift;
  }
  return static_cast<uint32_t>(result);
}

// Index i of those that are packed into `words` words.
BAGUA_HD uint32_t packed_index(const uint32_t* coded, int64_t words, int bits, int64_t i) {
  const int64_t bit = i * bits, word = bit / 32;
  if (bits == 0) return 0;
  uint64_t both = coded[word];
  if (word + 1 < words) both |= static_cast<uint64_t>(coded[word + 1]) << 32;
  return static_cast<uint32_t>(both >> bit % 32 & ((uint64_t{1} << bits) - 1));
}

}  // namespace bagua
