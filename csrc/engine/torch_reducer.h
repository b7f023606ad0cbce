// Finds parameters whose gradients torch's DistributedDataParallel communicates.
#pragma once

#include <ATen/core/Tensor.h>

namespace bagua {

// Note [Torch's reducer]
// Two wrappers that both average a gradient give a wrong mean: which one writes .grad last is
// chance. torch's reducer, which its DistributedDataParallel and composable replicate() make, puts
// a post hook on the accumulation node of each parameter and takes it away when it is destroyed.
// That hook is looked for at the wrap, before each forward and when a backward begins: replicate()
// makes its reducer inside the first forward.

// Whether such a hook is on the accumulation node of `parameter`, a leaf.
bool has_torch_reducer(const at::Tensor& parameter);

}  // namespace bagua
