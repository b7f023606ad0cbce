// The 56 bytes that every rank sends to every other at the start of a round.
#pragma once

#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "comm/communicator.h"
#include "engine/rank_samples.h"

namespace bagua {

// Values that ranks must have in common before bytes of a round are mixed.
struct AgreementRecord {
  uint64_t fingerprint;  // of the plan: buckets, slots, ops
  uint64_t round;        // number of the round, from 1
  uint64_t incarnation;  // of the run: restarts and re-wraps differ
  uint16_t flags;        // of the constants below
  uint16_t part;         // of the plan that the round is of, from 1; 0: of all
  float samples;         // RankSamples::number
  uint64_t frozen;       // hash of the parameters that were frozen after the wrap; 0: none
  // Hashes of a sample of the weights, or 0; see Note [Sample of the weights].
  uint64_t weights;         // at the start of the round
  uint64_t weights_before;  // at the first forward since the round before
};
static_assert(sizeof(AgreementRecord) == 56);

// Weights are compared if all ranks set this flag: one that answers a round without inputs, or has
// no hash yet, does not.
inline constexpr uint16_t kShowsWeights = 1;
inline constexpr uint16_t kSaysSamples = 2;   // RankSamples::said
inline constexpr uint16_t kSamplesLater = 4;  // RoundOpening::samples_later

// Note [Agreement]
// gloo does not compare sizes: an all_reduce of different sizes aborts one rank and returns wrong
// sums on the other. So no bucket of a round starts before all ranks have compared plan and
// round. The exchange runs on the first lane's thread, from the start of forward, hidden
// behind the forward pass.
//
// Note [Round trips]
// Messages that wait for each other, in a step of two far ranks that compute nothing: half a round
// trip for the agreement, which is awaited (Note [Messages wait for their receivers]), then those
// of the op: one for exact gradients, gossip and sparse gradients, one and a half for compressed
// all-reduces, two for PowerSGD. A round of DiLoCo has as many as its op, an elastic one asks the
// store once more. With more ranks a sum of exact values, of which PowerSGD has two, takes one and
// a half where paths are shortened (Communicator::shorten_paths), and gloo's ring elsewhere.

// Equal on all ranks.
struct Agreement {
  bool equal_weights;  // of the model: the samples are equal, at one of both moments
  Weighing weighing;
  bool samples_later;  // some rank weighs by samples, and some rank knows its number later
};

// Throws MismatchError naming the first field that differs and every rank's value, but samples and
// weights, which may differ.
[[nodiscard]] Agreement agree(Communicator& communicator, const AgreementRecord& mine);

}  // namespace bagua
