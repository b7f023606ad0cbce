// Tensors whose memory other processes can map.
#pragma once

#include <memory>

#include <ATen/core/Tensor.h>

#include "comm/shm/shared_memory.h"

namespace bagua {

// Moves a CPU tensor, the whole of its storage, into memory that other processes can map for
// reading, and returns that memory. It stays there as long as the storage, whose other views move
// along; raw pointers do not. A tensor that is there already stays where it is.
//
// Note [Shared tensors and fork]
// After fork a child's copy of such memory is private to it, as all of its memory is: its writes
// change nothing in the parent. Pages that the child has not written show the parent's later
// writes.
//
// Thread safety: any thread, one tensor at a time. May fail: Error for a part of a storage, and
// with the system's reason.
std::shared_ptr<SharedMemory> make_shareable(const at::Tensor& tensor);

}  // namespace bagua
