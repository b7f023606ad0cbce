#include "comm/shm/in_place.h"

#include <algorithm>
#include <cstring>
#include <vector>

#include "comm/shm/reduction.h"

namespace bagua {

void reduce_in_place(Meetings& meetings, const CallSite& site, const InPlaceValues& values,
                     ReduceOp op) {
  constexpr int64_t kStepBytes = 1 << 20;
  const auto [me, size] = meetings.group();
  const auto element = static_cast<int64_t>(c10::elementSize(values.dtype));
  const int64_t step = kStepBytes / element;
  const int64_t count = (values.numel + step - 1) / step;
  const auto piece = [&, size = size](int64_t number, int rank) {
    return BucketPiece(values.of_rank[rank] + number * step * element,
                       std::min(step, values.numel - number * step), size, element);
  };
  for (int64_t turn = 0; turn <= count + 1; ++turn) {
    if (turn >= 2) {
      const BucketPiece own = piece(turn - 2, me);
      for (int other = 1; other < size; ++other) {
        const int rank = (me + other) % size;  // not all from the same rank at the same time
        std::memcpy(own.part(rank), piece(turn - 2, rank).part(rank), own.bytes(rank));
      }
    }
    if (turn >= 1 && turn <= count) {
      const BucketPiece own = piece(turn - 1, me);
      std::vector<const std::byte*> sources;
      for (int rank = 0; rank < size; ++rank) sources.push_back(piece(turn - 1, rank).part(me));
      reduce_in_order(own.part(me), nullptr, sources, values.dtype, op, own.length(me));
    }
    meetings.meet(site);
  }
}

}  // namespace bagua
