// All-reduce of a bucket where it lies, in memory that all ranks have mapped.
#pragma once

#include <cstddef>
#include <cstdint>
#include <vector>

#include <c10/core/ScalarType.h>

#include "comm/shm/meetings.h"

namespace bagua {

// A bucket's values on all ranks.
struct InPlaceValues {
  std::vector<std::byte*> of_rank;  // where this rank sees them
  int64_t numel;
  at::ScalarType dtype;
};

// Note [Pieces of an all-reduce] without the showing: a rank joins its part of a piece where the
// values lie, into its own bucket, from where the others copy it. The first meeting says that all
// values are there, the last that all results have been copied.
//
// check_reduction() has passed, and the call has been described. Other ranks' values are only read.
// May fail: as Meetings.
void reduce_in_place(Meetings& meetings, const CallSite& site, const InPlaceValues& values,
                     ReduceOp op);

}  // namespace bagua
