// A hash of the bits of a tensor's elements and of their places, on CPU.
#pragma once

#include <cstdint>

#include <ATen/core/Tensor.h>

namespace bagua {

// The sum modulo 2^64 of mixed(v_i f_i) over `count` elements from number `from` on, in logical
// order whatever the strides. f_i is odd and differs from place to place, and no step loses
// anything, so a change of one element always changes the hash; of other changes it misses one in
// 2^32 or less, unless they are deliberate. An element of 16 bytes is two.
// `tensor`: in host memory, dense or strided.
uint64_t tensor_hash(const at::Tensor& tensor, int64_t from, int64_t count);

}  // namespace bagua
