#include "math/top_k.h"

#include <algorithm>
#include <array>
#include <bit>
#include <cstring>
#include <numeric>

#include "base/host_device.h"
#include "base/per_instruction_set.h"
#include "math/magnitude_key.h"

namespace bagua {
namespace {

constexpr int kDigitBits = 11;
constexpr int64_t kDigits = int64_t{1} << kDigitBits;
constexpr int64_t kBlock = 64;  // elements that are tested at once
constexpr int64_t kCrowd = 8;   // a bin with more than this part of all is looked at for one value
constexpr int64_t kStretch = 16384;  // elements after which the bound is looked at again

// The keys from `low` to `last`, distinguished by their bits from `shift` on.
template <typename T>
struct Range {
  Key<T> low;
  Key<T> last;
  int shift;
};

// Number of keys of a range per digit; correct from digit `bound` on.
struct Histogram {
  // Elements take turns between two counters, or a run of equal keys would have each count wait
  // for the one before.
  std::array<std::array<uint32_t, 2>, kDigits> counts{};
  int64_t bound = 0;  // the largest digit that `wanted` keys reach

  int64_t count(int64_t digit) const { return int64_t{counts[digit][0]} + counts[digit][1]; }
};

// Calls visit(i, key) for the elements of a block whose keys lie from `first` to `last`, in order.
// The comparison is a separate loop, which the compiler vectorises.
template <typename T, typename Visit>
BAGUA_HD void visit_block(const T* x, Key<T> first, Key<T> last, Visit visit) {
  constexpr int64_t kWord = sizeof(uint64_t);
  constexpr uint64_t kAllBetween = 0x0101010101010101;
  uint8_t between[kBlock];
  for (int64_t i = 0; i < kBlock; ++i) {
    const Key<T> key = key_of(x[i]);
    between[i] = static_cast<uint8_t>((key >= first) & (key <= last));
  }
  uint64_t words[kBlock / kWord], any = 0;
  std::memcpy(words, between, sizeof words);
  for (const uint64_t word : words) any |= word;
  if (any == 0) return;
  for (int64_t at = 0; at < kBlock; at += kWord) {
    uint64_t word = words[at / kWord];
    if (word == kAllBetween) {  // without searching for them
      for (int64_t i = at; i < at + kWord; ++i) visit(i, key_of(x[i]));
      continue;
    }
    for (; word != 0; word &= word - 1) {
      const int64_t i = at + std::countr_zero(word) / 8;
      visit(i, key_of(x[i]));
    }
  }
}

// Counts n elements.
template <typename T, typename Visit>
BAGUA_HD void visit_all(const T* x, int64_t n, Key<T> first, Key<T> last, Visit visit) {
  int64_t begin = 0;
  for (; begin + kBlock <= n; begin += kBlock) {
    visit_block(x + begin, first, last, [&](int64_t i, Key<T> key) { visit(begin + i, key); });
  }
  for (; begin < n; ++begin) {
    const Key<T> key = key_of(x[begin]);
    if (key >= first && key <= last) visit(begin, key);
  }
}

void raise_bound(int64_t wanted, Histogram& histogram) {
  int64_t reached = 0;
  for (int64_t digit = kDigits - 1; digit > histogram.bound; --digit) {
    reached += histogram.count(digit);
    if (reached >= wanted) {
      histogram.bound = digit;
      return;
    }
  }
}

// Steps 1 and 2.
template <typename T>
BAGUA_PER_INSTRUCTION_SET void count_keys(const T* x, int64_t n, const Range<T>& range,
                                          int64_t wanted, Histogram& histogram) {
  for (int64_t begin = 0; begin < n; begin += kStretch) {
    const Key<T> first = range.low + (static_cast<Key<T>>(histogram.bound) << range.shift);
    visit_all(x + begin, std::min(kStretch, n - begin), first, range.last,
              [&](int64_t i, Key<T> key) {
                ++histogram.counts[(key - range.low) >> range.shift][i % 2];
              });
    raise_bound(wanted, histogram);
  }
}

// The range without the ends that contain no key.
template <typename T>
BAGUA_PER_INSTRUCTION_SET Range<T> narrowed(const T* x, int64_t n, const Range<T>& range) {
  Key<T> low = range.last, last = range.low;
  for (int64_t i = 0; i < n; ++i) {
    const Key<T> key = key_of(x[i]);
    const bool inside = key >= range.low && key <= range.last;
    low = std::min(low, inside ? key : range.last);
    last = std::max(last, inside ? key : range.low);
  }
  return {.low = low, .last = last, .shift = range.shift};
}

// Step 3: the elements with larger keys than `threshold`, and the first `equals` with that key.
template <typename T>
BAGUA_PER_INSTRUCTION_SET void write_indices(const T* x, int64_t n, Key<T> threshold,
                                             int64_t equals, uint32_t* indices) {
  for (int64_t begin = 0; begin < n; begin += kStretch) {
    const Key<T> first = threshold + (equals > 0 ? 0 : 1);
    visit_all(x + begin, std::min(kStretch, n - begin), first, kLargestKey<T>,
              [&](int64_t i, Key<T> key) {
                if (key == threshold && equals-- <= 0) return;
                *indices++ = static_cast<uint32_t>(begin + i);
              });
  }
}

}  // namespace

template <typename T>
void top_k(const T* x, int64_t n, int64_t k, uint32_t* indices) {
  if (k >= n) return std::iota(indices, indices + n, 0u);
  if (k == 0) return;
  const Range<T> everything{.low = 0, .last = kLargestKey<T>, .shift = 8 * sizeof(T) - 1};
  // One value to begin with may be the only one, as where layers have no gradient.
  const Range<T> beginning = narrowed(x, std::min(n, kStretch), everything);
  Range<T> range = everything;
  if (beginning.low == beginning.last) range = narrowed(x, n, everything);
  int64_t wanted = k;  // of the keys in range, which are equal above bit `shift`
  while (range.shift > 0 && range.low < range.last) {
    range.shift = std::max(0, range.shift - kDigitBits);
    Histogram histogram;
    // 1.
    count_keys(x, n, range, wanted, histogram);
    const int64_t digit = histogram.bound;
    for (int64_t larger = digit + 1; larger < kDigits; ++larger) wanted -= histogram.count(larger);
    // 2.
    range.low += static_cast<Key<T>>(digit) << range.shift;
    // A narrowed range need not end where a digit does: keys above it are counted already.
    range.last = std::min(range.last, range.low + ((Key<T>{1} << range.shift) - 1));
    const int64_t count = histogram.count(digit);
    if (count == wanted) break;
    if (count > n / kCrowd) range = narrowed(x, n, range);
  }
  // 3.
  write_indices(x, n, range.low, wanted, indices);
}

template void top_k<float>(const float*, int64_t, int64_t, uint32_t*);
template void top_k<double>(const double*, int64_t, int64_t, uint32_t*);

}  // namespace bagua
