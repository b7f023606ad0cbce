// The kernel of random orders on the fake device.
#pragma once

#include "device_streams/noting.h"
#include "math/random_order.h"

namespace bagua::fake {

class NotingOrder final : public OrderKernel {
 public:
  void fill(const RandomOrder& order, int64_t first, int64_t count_of_places, int64_t* values,
            void* stream) const override {
    count({.launches = 1});
    note("fill_order", stream, values, count_of_places * int64_t{sizeof(int64_t)}, true);
    for (int64_t i = 0; i < count_of_places; ++i) values[i] = order.at(first + i);
  }
};

}  // namespace bagua::fake
