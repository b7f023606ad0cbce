// A pseudo-random permutation whose elements can be computed one by one.
#pragma once

#include <array>
#include <cstdint>

namespace bagua {

// A permutation of 0 ... n - 1 that `seed` and `number` decide, equal on all machines; another
// `number` gives an order that has nothing to do with it. It takes no memory: place i is computed
// from i alone, by a Feistel network over the next even number of bits, walked until it falls below
// n (Black and Rogaway, *Ciphers with Arbitrary Finite Domains*, CT-RSA 2002).
//
// 0 <= n < 2^62. Immutable, so thread-safe.
class RandomOrder {
 public:
  RandomOrder(int64_t n, uint64_t seed, uint64_t number);

  // 0 <= place < n; every value below n is at one place.
  int64_t at(int64_t place) const;

 private:
  static constexpr int kRounds = 6;

  uint64_t n_;
  int half_bits_;
  std::array<uint64_t, kRounds> keys_;
};

}  // namespace bagua
