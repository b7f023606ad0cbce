// State that an engine's lanes share with it; private to engine/.
#pragma once

#include <functional>
#include <mutex>
#include <optional>
#include <string>
#include <vector>

#include "base/check.h"
#include "comm/device_stream.h"
#include "engine/engine.h"
#include "engine/lane.h"
#include "engine/round_state.h"
#include "engine/weights_sample.h"

namespace bagua {

// Rounds over buckets that are fixed up front: which of them run, and what callers wait for.
struct Engine::State final : LaneCore {
  struct Progress {
    size_t lane;
    int64_t ready_ns;
    StreamPoints ready;  // the work that fills its slots
    BucketStats stats;
    int64_t done_in = 0;  // the last round that it was done in
  };
  struct LaneState {
    std::optional<size_t> running;
    CountingCommunicators communicators;
    std::optional<c10::Stream> stream;  // of its ops; none on CPU
  };

  State(std::vector<Lane> lanes, EngineOptions engine_options);

  // Lane side.
  void run_agreement(int64_t for_round, const RoundOpening& opening,
                     const std::optional<WeightsDigest>& weights);
  void run_bucket(size_t index);
  void run_exchange_used();

  // Caller's side: work enqueued on the caller's current stream from now on follows what the
  // lanes' streams have been given; see Note [Streams].
  void order_after_lanes() const;
  void leave_lanes() const noexcept;  // the order at shutdown, when the device may be gone already

  // Throws a failure of work that the lanes have put on a device.
  void check_device(std::unique_lock<std::mutex>& lock);

  // Blocks until `done` holds under the lock; see Engine::wait for what it throws. The time counts
  // as exposed.
  void block(std::unique_lock<std::mutex>& lock, const std::function<bool()>& done,
             const char* what);
  // Throws the stored failure, or if no round is open.
  void check_open(std::unique_lock<std::mutex>& lock);
  std::string outstanding() const;
  // The end of a wait that took too long, which another rank may have caused.
  void time_out(std::unique_lock<std::mutex>& lock, const char* what);

  Whereabouts whereabouts() const override;
  std::string place() const override { return concat("round ", round.number()); }
  Position position() const override { return {.number = round.number()}; }
  int64_t rounds_done() const override;
  std::string error_of_caller() const override;

  EngineOptions options;
  std::vector<Bucket> buckets;
  std::vector<LaneState> lanes;

  std::vector<Progress> progress;
  std::string error;  // what autograd has thrown in the open round
  RoundState round;
  float grad_scale = 1.0f;
  std::vector<uint8_t> used;
  OverlapClock clock;
};

}  // namespace bagua
