#include "comm/shm/in_place.h"

#include <algorithm>
#include <cstring>
#include <vector>

#include "comm/shm/reduction.h"

namespace bagua {
namespace {

constexpr int64_t kStepBytes = 1 << 20;

// A bucket in pieces, as one rank works on it.
class PiecesInPlace final {
 public:
  PiecesInPlace(Group group, const InPlaceValues& values)
      : group_(group), values_(values), step_(kStepBytes / element()) {}

  int64_t count() const { return (values_.numel + step_ - 1) / step_; }

  void join_own_part(int64_t number, ReduceOp op) const {
    const BucketPiece own = piece(number, group_.rank);
    std::vector<const std::byte*> sources;
    for (int rank = 0; rank < group_.size; ++rank) {
      sources.push_back(piece(number, rank).part(group_.rank));
    }
    reduce_in_order(own.part(group_.rank), nullptr, sources, values_.dtype, op,
                    own.length(group_.rank));
  }

  // Not all from the same rank at the same time.
  void copy_other_parts(int64_t number) const {
    const BucketPiece own = piece(number, group_.rank);
    for (int other = 1; other < group_.size; ++other) {
      const int rank = (group_.rank + other) % group_.size;
      std::memcpy(own.part(rank), piece(number, rank).part(rank), own.bytes(rank));
    }
  }

 private:
  int64_t element() const { return static_cast<int64_t>(c10::elementSize(values_.dtype)); }
  BucketPiece piece(int64_t number, int rank) const {
    return {values_.of_rank[rank] + number * step_ * element(),
            std::min(step_, values_.numel - number * step_), group_.size, element()};
  }

  const Group group_;
  const InPlaceValues& values_;
  const int64_t step_;  // elements
};

}  // namespace

void reduce_in_place(Meetings& meetings, const CallSite& site, const InPlaceValues& values,
                     ReduceOp op) {
  const PiecesInPlace pieces(meetings.group(), values);
  for (int64_t turn = 0; turn <= pieces.count() + 1; ++turn) {
    if (turn >= 2) pieces.copy_other_parts(turn - 2);
    if (turn >= 1 && turn <= pieces.count()) pieces.join_own_part(turn - 1, op);
    meetings.meet(site);
  }
}

}  // namespace bagua
