#include "math/random_order.h"

#include <bit>

namespace bagua {

RandomOrder::RandomOrder(int64_t n, uint64_t seed, uint64_t number)
    : n_(static_cast<uint64_t>(n)), half_bits_((std::bit_width(n_ > 0 ? n_ - 1 : 0) + 1) / 2) {
  uint64_t state = mixed_bits(seed) ^ mixed_bits(~number);
  for (uint64_t& key : keys_) key = mixed_bits(state += 0x9e3779b97f4a7c15);
}

}  // namespace bagua
