// State that an engine's lanes share with it; private to engine/.
#pragma once

#include <atomic>
#include <condition_variable>
#include <exception>
#include <functional>
#include <mutex>
#include <optional>
#include <string>
#include <vector>

#include "comm/device_stream.h"
#include "engine/engine.h"
#include "engine/lane_thread.h"
#include "engine/round_state.h"
#include "engine/weights_sample.h"

namespace bagua {

// Lives as long as the engine or the last lane thread that is still blocked in a transport.
// One mutex; it is never held while an op runs or the store is queried.
struct Engine::State {
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
  void check_communicators(std::unique_lock<std::mutex>& lock);

  // Keeps the first failure, publishes it, and makes every communicator refuse further calls.
  void fail(const std::exception_ptr& failure) noexcept;
  void end_with(const std::exception_ptr& failure, const FailureBoard::News& news) noexcept;
  void abort_communicators(const std::string& reason) const noexcept;

  // Blocks until `done` holds under the lock; see Engine::wait for what it throws. The time counts
  // as exposed.
  void block(std::unique_lock<std::mutex>& lock, const std::function<bool()>& done,
             const char* what);
  // Publishes what options.check_signals throws, and throws it.
  void look_for_signals(std::unique_lock<std::mutex>& lock, const char* what);
  [[noreturn]] void rethrow(std::unique_lock<std::mutex>& lock);
  // Throws the stored failure, or if no round is open.
  void check_open(std::unique_lock<std::mutex>& lock);
  std::string outstanding() const;
  std::string whoami() const;
  Whereabouts whereabouts() const;  // takes the lock

  EngineOptions options;
  std::vector<Bucket> buckets;
  std::vector<LaneState> lanes;
  std::vector<std::unique_ptr<LaneThread>> threads;  // of the lanes

  mutable std::mutex mutex;
  std::condition_variable changed;
  std::vector<Progress> progress;
  std::exception_ptr failure;
  bool failed_alike = false;     // every rank has the failure: it needs no explanation
  std::exception_ptr diagnosed;  // the failure, explained; made once
  std::string error;             // what autograd has thrown in the open round
  bool stopped = false;
  RoundState round;
  float grad_scale = 1.0f;
  std::vector<uint8_t> used;
  OverlapClock clock;
};

}  // namespace bagua
