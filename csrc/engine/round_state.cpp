#include "engine/round_state.h"

#include "base/check.h"

namespace bagua {

RoundState::RoundState(const std::vector<std::vector<Shape>>& lanes) {
  for (const std::vector<Shape>& lane : lanes) {
    const size_t begin = buckets_.size();
    for (const Shape& shape : lane) {
      slots_.insert(slots_.end(), shape.slots, {.bucket = buckets_.size(), .marked = false});
      buckets_.push_back(
          {.lane = lanes_.size(), .shape = shape, .pending = shape.slots, .takes_part = true});
    }
    lanes_.push_back({.begin = begin, .end = buckets_.size(), .next = begin});
  }
}

void RoundState::begin(bool alone, std::optional<int32_t> part) {
  open_ = true;
  ++number_;
  if (alone) agreed_ = number_;
  absent_ = taking_ = launched_ = done_ = 0;
  exchanges_ = 0;
  for (Bucket& bucket : buckets_) {
    bucket.takes_part = !part || bucket.shape.part == *part;
    bucket.pending = bucket.takes_part ? bucket.shape.slots : 0;
    taking_ += bucket.takes_part ? 1 : 0;
    absent_ += bucket.takes_part ? 0 : bucket.shape.slots;
  }
  for (Slot& slot : slots_) slot.marked = !buckets_[slot.bucket].takes_part;
  for (LaneOrder& lane : lanes_) lane.next = lane.begin;
  marked_ = absent_;
}

void RoundState::end() {
  if (complete()) open_ = false;
}

bool RoundState::mark(size_t slot) {
  slots_[slot].marked = true;
  ++marked_;
  return --buckets_[slots_[slot].bucket].pending == 0;
}

std::vector<size_t> RoundState::launch_from(size_t bucket) {
  LaneOrder& lane = lanes_[buckets_[bucket].lane];
  std::vector<size_t> launched;
  for (; lane.next < lane.end && buckets_[lane.next].pending == 0; ++lane.next) {
    if (buckets_[lane.next].takes_part) launched.push_back(lane.next);
  }
  launched_ += launched.size();
  return launched;
}

bool RoundState::launched(size_t bucket) const {
  const Bucket& one = buckets_.at(bucket);
  return one.takes_part && bucket < lanes_[one.lane].next;
}

std::string RoundState::text() const {
  if (!open_) return "between two rounds";
  const std::string what = complete() ? "communicating"
                                      : concat("computing, ", marked_ - absent_, " of ",
                                               slots_.size() - absent_, " tensors are ready");
  return concat(what, ", ", done_, " of ", taking_, " buckets are done");
}

}  // namespace bagua
