// What the ranks of a schedule have in common: a plan drawn at random, and where they meet.
#pragma once

#include <algorithm>
#include <chrono>
#include <memory>
#include <random>
#include <stdexcept>
#include <string>
#include <vector>

#include "base/check.h"
#include "codec/factory.h"
#include "comm/counting_communicator.h"
#include "stress/meeting_place.h"
#include "stress/turbulence.h"

namespace bagua::stress {

using std::chrono::milliseconds;
using Random = std::mt19937_64;
using Delays = std::shared_ptr<Turbulence>;

constexpr milliseconds kPatient{20000};

inline int between(Random& random, int low, int high) {
  return std::uniform_int_distribution<int>(low, high)(random);
}

// What the program looks for: something that should hold did not.
class Broken final : public std::logic_error {
  using std::logic_error::logic_error;
};

template <typename... Args>
void expect(bool condition, const Args&... what) {
  if (!condition) throw Broken(concat(what...));
}

struct BucketPlan {
  std::vector<int64_t> slots;  // elements of each
  std::string codec;           // empty: exact
  ReduceOp op;
  int64_t numel() const {
    int64_t total = 0;
    for (const int64_t slot : slots) total += slot;
    return total;
  }
};

// The most of each that a plan has.
struct PlanLimits {
  int ranks = 4;
  int lanes = 3;
  int buckets = 5;
  int slots = 6;
  int numel = 3000;           // of a slot
  int numel_of_few = 200000;  // of one slot in ten
};

// The places and the store in which the ranks meet, and a plan drawn at random, equal on all ranks.
struct World {
  World(Random& random, int least_ranks, milliseconds engine_timeout, const PlanLimits& limits,
        const Delays& delays)
      : ranks(between(random, least_ranks, limits.ranks)),
        lanes(between(random, 1, limits.lanes)),
        timeout(engine_timeout),
        turbulence(delays),
        kind(between(random, 0, 2) == 0 ? MeetingPlace::Kind::kSharedMemory
                                        : MeetingPlace::Kind::kHub) {
    meet_anew();
    const std::vector<std::string> codecs = codec_names();
    for (int i = between(random, 1, limits.buckets); i > 0; --i) {
      BucketPlan bucket;
      for (int slot = between(random, 1, limits.slots); slot > 0; --slot) {
        const bool one_of_few = between(random, 0, 9) == 0;
        bucket.slots.push_back(between(random, 1, one_of_few ? limits.numel_of_few : limits.numel));
      }
      const int codec = between(random, -1, static_cast<int>(codecs.size()) - 1);
      if (codec >= 0) bucket.codec = codecs[codec];
      bucket.op = between(random, 0, 1) ? ReduceOp::kAvg : ReduceOp::kSum;
      buckets.push_back(std::move(bucket));
    }
  }

  // Makes a store and places that no rank has been to.
  void meet_anew() {
    store = c10::make_intrusive<TurbulentStore>(turbulence);
    // The places wait for longer than any engine: it is the engine's own deadline that is tried.
    const auto place = [&] { return std::make_shared<MeetingPlace>(kind, ranks, kPatient); };
    control = place();
    places.clear();
    for (int i = 0; i < lanes; ++i) places.push_back(place());
  }

  // The communicator of `rank` in a place.
  std::shared_ptr<CountingCommunicator> connect(const std::shared_ptr<MeetingPlace>& place,
                                                int rank) const {
    return std::make_shared<CountingCommunicator>(
        std::make_unique<TurbulentCommunicator>(place->connect(rank), turbulence));
  }

  // See Turbulence::point.
  void point() const { turbulence->point(); }

  int ranks;
  int lanes;
  milliseconds timeout;
  Delays turbulence;
  MeetingPlace::Kind kind;
  std::vector<BucketPlan> buckets;
  std::shared_ptr<MeetingPlace> control;
  std::vector<std::shared_ptr<MeetingPlace>> places;  // one per lane
  c10::intrusive_ptr<c10d::HashStore> store;
};

// What rank `rank` brings in round `round`: within [-1, 1], different everywhere.
inline float value_of(int rank, int64_t round, size_t bucket, int64_t i) {
  const int64_t mixed = i * 37 + rank * 101 + round * 53 + static_cast<int64_t>(bucket) * 17;
  return static_cast<float>(mixed % 257 - 128) / 128.0f;
}

inline double tolerance(const BucketPlan& bucket, int ranks) {
  const double scale = bucket.op == ReduceOp::kAvg ? 1.0 : ranks;
  // Two half-steps of a range of at most 2 (4 ranks' sum: 8) in 255 steps.
  if (bucket.codec.ends_with("uint8")) return scale * 1.02 * 2.0 / 255;
  // Two steps, as the far end of a block may be a whole one off: eighths of the largest magnitude.
  if (bucket.codec == "int4_block") return scale * 1.02 * 2.0 / 8;
  // Within [-1, 1] everything is.
  if (bucket.codec == "bit2_block") return scale * 1.02 * 2.0;
  if (bucket.codec == "bf16") return scale * 1.02 / 128;
  if (bucket.codec == "fp16") return scale * 1.02 / 1024;
  TORCH_CHECK(bucket.codec.empty(), "codec '", bucket.codec, "' needs a tolerance here.");
  return scale * 1e-6;
}

}  // namespace bagua::stress
