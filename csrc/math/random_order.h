// A pseudo-random permutation whose elements can be computed one by one.
#pragma once

#include <cstdint>
#include <memory>

#include "base/host_device.h"
#include "base/mixed_bits.h"

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
  BAGUA_HD int64_t at(int64_t place) const {
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

 private:
  static constexpr int kRounds = 6;

  uint64_t n_;
  int half_bits_;
  uint64_t keys_[kRounds];
};

// Places of an order, computed on a device.
//
// Thread safety: const and stateless. Ordering: on `stream`, a cudaStream_t. May fail: Error where
// CUDA refuses the launch.
class OrderKernel {
 public:
  virtual ~OrderKernel() = default;

  // values[i] = order.at(first + i) for i < count; `values` is device memory.
  virtual void fill(const RandomOrder& order, int64_t first, int64_t count, int64_t* values,
                    void* stream) const = 0;
};

// Null if this build has no CUDA kernels.
std::shared_ptr<const OrderKernel> make_cuda_order_kernel();

}  // namespace bagua
