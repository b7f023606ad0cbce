// The chunks of one launch, as they travel in a kernel's parameters: no copy to the device, no
// memory that must outlive the call, and a captured CUDA graph keeps them.
#pragma once

#include <cstdint>
#include <span>

#include "base/host_device.h"
#include "codec/codec.h"

namespace bagua {

// The work on a chunk is cut into units, numbered through all chunks of the batch.
struct ChunkBatch {
  static constexpr int kCapacity = 120;

  int32_t count = 0;
  int64_t first_unit[kCapacity + 1] = {};  // of each chunk; behind the last chunk: all units
  Chunk chunks[kCapacity];

  BAGUA_HD int64_t units() const { return first_unit[count]; }

  // The chunk that has `unit`, one of units().
  BAGUA_HD int chunk_of(int64_t unit) const {
    int low = 0;
    int high = count;  // first_unit[low] <= unit < first_unit[high]
    while (high - low > 1) {
      const int middle = (low + high) / 2;
      if (first_unit[middle] <= unit) {
        low = middle;
      } else {
        high = middle;
      }
    }
    return low;
  }
};
// A kernel's parameters have 4 KiB in all.
static_assert(sizeof(ChunkBatch) <= 4096 - 64);

// Calls function(batch) for as many batches as the chunks fill; units_of(numel) says how many units
// a chunk has. Chunks without units are left out.
template <typename UnitsOf, typename Function>
void for_each_batch(std::span<const Chunk> chunks, UnitsOf&& units_of, Function&& function) {
  ChunkBatch batch;
  for (const Chunk& chunk : chunks) {
    const int64_t units = units_of(chunk.numel);
    if (units == 0) continue;
    if (batch.count == ChunkBatch::kCapacity) {
      function(batch);
      batch.count = 0;
    }
    batch.chunks[batch.count] = chunk;
    batch.first_unit[batch.count + 1] = batch.first_unit[batch.count] + units;
    ++batch.count;
  }
  if (batch.count > 0) function(batch);
}

}  // namespace bagua
