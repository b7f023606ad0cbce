// Pseudo-random bits from numbers.
#pragma once

#include <cstdint>

#include "base/host_device.h"

namespace bagua {

// The finaliser of splitmix64 (Steele, Lea and Flood, OOPSLA 2014): each bit of the result depends
// on all bits of the value.
BAGUA_HD uint64_t mixed_bits(uint64_t value) {
  value = (value ^ (value >> 30)) * 0xbf58476d1ce4e5b9;
  value = (value ^ (value >> 27)) * 0x94d049bb133111eb;
  return value ^ (value >> 31);
}

}  // namespace bagua
