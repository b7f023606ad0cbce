#include "engine/round_state.h"

#include "base/check.h"

namespace bagua {

RoundState::RoundState(const std::vector<std::vector<size_t>>& lanes) {
  for (const std::vector<size_t>& lane : lanes) {
    const size_t begin = buckets_.size();
    for (const size_t slots : lane) {
      slots_.insert(slots_.end(), slots, {.bucket = buckets_.size(), .marked = false});
      buckets_.push_back({.lane = lanes_.size(), .slots = slots, .pending = slots});
    }
    lanes_.push_back({.begin = begin, .end = buckets_.size(), .next = begin});
  }
}

void RoundState::begin(bool alone) {
  open_ = true;
  ++number_;
  if (alone) agreed_ = number_;
  marked_ = launched_ = done_ = 0;
  exchanges_ = 0;
  for (Slot& slot : slots_) slot.marked = false;
  for (LaneOrder& lane : lanes_) lane.next = lane.begin;
  for (Bucket& bucket : buckets_) bucket.pending = bucket.slots;
}

void RoundState::end() {
  if (complete()) open_ = false;
}

bool RoundState::mark(size_t slot) {
  slots_[slot].marked = true;
  ++marked_;
  return --buckets_[slots_[slot].bucket].pending == 0;
}

RoundState::Launch RoundState::launch_from(size_t bucket) {
  LaneOrder& lane = lanes_[buckets_[bucket].lane];
  const size_t first = lane.next;
  while (lane.next < lane.end && buckets_[lane.next].pending == 0) ++lane.next;
  launched_ += lane.next - first;
  return {.lane = buckets_[bucket].lane, .first = first, .count = lane.next - first};
}

bool RoundState::launched(size_t bucket) const {
  return bucket < lanes_[buckets_.at(bucket).lane].next;
}

std::string RoundState::text() const {
  if (!open_) return "between two rounds";
  const std::string what =
      complete() ? "communicating"
                 : concat("computing, ", marked_, " of ", slots_.size(), " tensors are ready");
  return concat(what, ", ", done_, " of ", buckets_.size(), " buckets are done");
}

}  // namespace bagua
