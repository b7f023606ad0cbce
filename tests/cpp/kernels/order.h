// Random orders: the kernel beside the CPU.
#pragma once

#include <cstdio>
#include <cstdlib>
#include <vector>

#include "math/random_order.h"

namespace bagua {

inline void compare_random_orders() {
  const auto cuda = make_cuda_order_kernel();
  for (const int64_t n : {1, 2, 3, 255, 257, 70000, (1 << 20) + 1}) {
    for (uint64_t number = 0; number < 3; ++number) {
      const RandomOrder order(n, 11 + number, number);
      const int64_t first = n / 3, count = n < 5000 ? n - first : 4321;
      std::vector<int64_t> values(count, -1);
      cuda->fill(order, first, count, values.data(), nullptr);
      for (int64_t i = 0; i < count; ++i) {
        if (values[i] == order.at(first + i)) continue;
        std::printf("fill_order: place %ld of an order of %ld is wrong\n",
                    static_cast<long>(first + i), static_cast<long>(n));
        std::exit(1);
      }
    }
  }
}

}  // namespace bagua
