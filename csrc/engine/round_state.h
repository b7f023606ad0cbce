// Progress of a round: which slots are marked, which buckets are launched and done.
#pragma once

#include <cstddef>
#include <cstdint>
#include <optional>
#include <string>
#include <vector>

namespace bagua {

// Note [Launch order]
// Buckets launch in registration order within a lane, whatever the order in which they become
// ready, so ranks whose gradients arrive in different orders cannot deadlock.
//
// Note [Rounds]
// A round is one synchronising backward (or one communicating step). begin() opens it. While
// nothing has been marked it may be begun again (a forward without backward). A round in which some
// slots were marked but not all when the next one begins was left unfinished.
// A round may be of one part of the plan: the slots of other buckets count as marked, and those
// buckets are not launched.
//
// Thread safety: none; the engine's mutex guards it. Counts and decides, and starts nothing.
class RoundState {
 public:
  struct Shape {
    size_t slots;
    int32_t part;
  };
  // `lanes`: per lane its buckets, in launch order. Slots and buckets are numbered through, lane
  // after lane.
  explicit RoundState(const std::vector<std::vector<Shape>>& lanes);

  // The next round; `alone`: there are no other ranks to agree with. `part`: without it, all.
  void begin(bool alone, std::optional<int32_t> part = {});
  // Ends the open round if every slot is marked; else it stays open, for what is marked later.
  void end();

  bool open() const { return open_; }
  int64_t number() const { return number_; }  // of the open round or the last one
  bool untouched() const { return marked_ == absent_; }
  bool complete() const { return marked_ == slots_.size(); }
  size_t unmarked() const { return slots_.size() - marked_; }
  size_t slots() const { return slots_.size(); }
  bool marked(size_t slot) const { return slots_.at(slot).marked; }

  void agree(int64_t round) { agreed_ = round; }
  bool agreed() const { return agreed_ == number_; }

  size_t bucket_of(size_t slot) const { return slots_.at(slot).bucket; }
  // Marks a slot; true if its bucket has become ready. Not to be called for a marked one.
  bool mark(size_t slot);
  // The buckets of `bucket`'s lane that are ready and next in order, but those that take no part.
  // They count as launched.
  std::vector<size_t> launch_from(size_t bucket);

  void bucket_done() { ++done_; }
  void exchange_begins() { ++exchanges_; }
  void exchange_done() { --exchanges_; }
  // Whether all launched work is done.
  bool launched_done() const { return launched_ == done_ && exchanges_ == 0; }
  // Whether `bucket` was launched in this round.
  bool launched(size_t bucket) const;

  // "computing, 3 of 8 tensors are ready, 0 of 2 buckets are done", or that no round is open.
  std::string text() const;

 private:
  struct Slot {
    size_t bucket;
    bool marked;
  };
  struct Bucket {
    size_t lane;
    Shape shape;
    size_t pending;   // slots that are not marked
    bool takes_part;  // it is of the part that the round is of
  };
  struct LaneOrder {
    size_t begin, end;  // its buckets
    size_t next;        // the first that was not launched
  };

  std::vector<Slot> slots_;
  std::vector<Bucket> buckets_;
  std::vector<LaneOrder> lanes_;
  bool open_ = false;
  int64_t number_ = 0;
  int64_t agreed_ = 0;
  size_t absent_ = 0;  // slots of buckets that take no part
  size_t taking_ = 0;  // buckets that take part
  size_t marked_ = 0;
  size_t launched_ = 0;
  size_t done_ = 0;
  int exchanges_ = 0;
};

}  // namespace bagua
