// A hash of a sample of the weights, another sample every round, compared in the agreement.
#pragma once

#include <cstdint>
#include <memory>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include <ATen/core/Tensor.h>

#include "comm/communicator.h"

namespace bagua {

// Hashes of the weights sampled for `round`.
struct WeightsDigest {
  int64_t round;
  size_t first;  // index of the first weight of the sample
  // One for that weight, and one for each that follows it in the sample.
  std::vector<uint64_t> parts;        // as the round began
  std::vector<uint64_t> early_parts;  // as take_early() found them; empty: it was not called

  const std::vector<uint64_t>& before() const { return early_parts.empty() ? parts : early_parts; }
};

// Changes if one of the parts changes.
uint64_t combined(const std::vector<uint64_t>& parts);

// Note [Sample of the weights]
// The elements of all weights, in their logical order, are cut into equal windows, at most `every`
// of them; one window is hashed per round, so that every element is looked at once in `every`
// rounds. A model with few elements has fewer windows: below kLeastElements a smaller one would
// save nothing.
// The list of weights and their sizes is fixed at construction and equal on all ranks (part
// of the engine's fingerprint), so windows are too. A weight that has changed (another
// size, dtype or device, memory taken away) counts as a constant.
// Weights may differ between ranks for the time of a forward: SAM (Foret et al., ICLR 2021) moves
// them along a gradient of each rank's own, which it gets from a forward inside no_sync(). So they
// are sampled as the first forward since the last round begins, too, and ranks whose weights were
// equal at one of both moments have not drifted apart.
// On CPU a digest is of the round that begins. On a device the hashes are computed on the caller's
// current stream and copied to the host behind it. They are compared kDelay rounds later, without
// waiting: a host that is further ahead of its device leaves that window to the next time.
//
// Thread safety: take() from one thread at a time, the rest from any. Ownership: shares the
// tensors' memory; `p.data = x` is seen. Ordering: take() reads the weights after the work that the
// current stream has been given.
class WeightsSample {
 public:
  static constexpr int64_t kLeastElements = 1024;
  static constexpr int kDelay = 8;

  // Throws std::invalid_argument if there are no elements, or weights on several devices.
  WeightsSample(std::vector<std::pair<std::string, at::Tensor>> weights, int64_t every);
  ~WeightsSample();

  // Hashes the window of `round`, of which take() has not been called yet; once is enough.
  void take_early(int64_t round);

  // Hashes the window of `round`. The digest to compare in it; none if there is none yet.
  std::optional<WeightsDigest> take(int64_t round);

  // After ranks have found different digests: all of them call it, on one communicator. Throws
  // MismatchError that names the first weight that differs and the ranks that hold each version.
  [[noreturn]] void name_difference(Communicator& communicator, const WeightsDigest& mine) const;

  // One line per weight; samples of which these are equal have equal windows.
  std::vector<std::string> describe() const;
  int64_t windows() const { return (total_ + window_ - 1) / window_; }

 private:
  struct Entry {
    std::string name;
    at::Tensor tensor;
    at::ScalarType dtype;
    int64_t begin;  // its place in the sequence of all elements
    int64_t numel;
  };
  struct Piece {  // of a weight, inside a window
    const Entry& entry;
    int64_t from;
    int64_t count;
  };
  struct InFlight;  // of a device

  std::vector<Piece> pieces_of(int64_t round) const;
  size_t first_of(int64_t round) const;
  bool readable(const Entry& entry) const;
  std::vector<uint64_t> hash_now(int64_t round) const;
  std::optional<WeightsDigest> on_device(int64_t round);
  void enqueue_hashes(int64_t round, const at::Tensor& results) const;
  void enqueue_hash(const Piece& piece, at::Tensor& result) const;

  std::vector<Entry> entries_;
  int64_t total_ = 0;
  int64_t window_ = 0;
  at::Device device_{at::kCPU};
  int64_t early_round_ = 0;                        // 0: none
  std::vector<uint64_t> early_parts_;              // of that round; on CPU
  at::Tensor factors_;                             // of a device
  std::vector<std::unique_ptr<InFlight>> flight_;  // of a device: kDelay of them, by round
};

}  // namespace bagua
