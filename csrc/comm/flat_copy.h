// Tensors as the flat memory that transports move.
#pragma once

#include <ATen/core/Tensor.h>

namespace bagua {

// An alias without autograd, and without a Python object that a transport's thread could drop last.
inline at::Tensor flat(const at::Tensor& tensor) { return tensor.detach().view({-1}); }

inline void copy_unless_same(at::Tensor target, const at::Tensor& source) {
  if (target.data_ptr() != source.data_ptr()) target.copy_(source);
}

}  // namespace bagua
