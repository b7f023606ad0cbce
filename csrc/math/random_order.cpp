#include "math/random_order.h"

#include <bit>

#include "base/mixed_bits.h"

namespace bagua {
RandomOrder::RandomOrder(int64_t n, uint64_t seed, uint64_t number)
    : n_(static_cast<uint64_t>(n)), half_bits_((std::bit_width(n_ > 0 ? n_ - 1 : 0) + 1) / 2) {
  uint64_t state = mixed_bits(seed) ^ mixed_bits(~number);
  for (uint64_t& key : keys_) key = mixed_bits(state += 0x9e3779b97f4a7c15);
}

int64_t RandomOrder::at(int64_t place) const {
  const uint64_t mask = (uint64_t{1} << half_bits_) - 1;
  auto value = static_cast<uint64_t>(place);
  do {
    uint64_t left = value >> half_bits_, right = value & mask;
    for (const uint64_t key : keys_) {
      const uint64_t next = left ^ (mixed_bits(right + key) & mask);
      left = right;
      right = next;
    }
    value = left << half_bits_ | right;
  } while (value >= n_);
  return static_cast<int64_t>(value);
}

}  // namespace bagua
