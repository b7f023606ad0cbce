// Mixing with both neighbours on the ring, through compressed differences.
#pragma once

#include <memory>
#include <string>

#include "codec/codec.h"
#include "comm/communicator.h"
#include "ledger/scratch.h"
#include "op/contract/bucket_op.h"
#include "op/wire/framed_exchange.h"

namespace bagua {

// f32, one dimension, of the bucket's length; shared with the algorithm, which saves them.
struct Replicas {
  at::Tensor own;    // W: what the others believe this rank to hold
  at::Tensor left;   // L: equal to W of the left neighbour
  at::Tensor right;  // R: equal to W of the right neighbour
};

// Shares of the neighbours' weights in the mix; the own weights have 1 - left - right.
struct MixingWeights {
  double left;
  double right;
};

// Decentralized training with compressed differences (Tang et al., NeurIPS 2018, DCD-PSGD; Bagua,
// VLDB 2022). x is the bucket after the local optimizer step:
//   1. d = ((x + wl L) + wr R) - (1 + wl + wr) W in f32, each product and sum rounded: the mix of
//      the three replicas and of what the optimizer did, as a difference from W; q = encode(d);
//   2. exchange q with both neighbours, and as each segment has arrived from both:
//   3. W += decode(own q); x = W;
//   4. L += decode(q of the left), R += decode(q of the right).
// All of these are the same f32 addition of the same bytes, so bit for bit L of a rank is W of the
// rank on its left, and R that of the one on its right, if they were so before.
//
// With two ranks both neighbours are one: it is sent one message, which counts for L and R. With
// one rank nothing is done. Buckets of any floating dtype; the wire and the replicas are f32. On a
// device step 1 is one launch, and steps 3 and 4 are one, if the codec can.
//
// Note [Replicas stay finite]
// Where a replica's sum would not be finite, the replica keeps its value, by the same rule on all
// ranks that hold a copy; x becomes that non-finite sum on its own rank, and NaN on both
// neighbours. So a NaN passes on and is seen, as with any exact mean, and once finite weights are
// loaded the replicas are what they were before it.
//
// Ownership: replicas are changed by run() only, and may be read when no round is under way. May
// fail: std::invalid_argument for what does not fit; MismatchError for a peer's other plan, and
// then, as after any failure of the transport, replicas of different ranks no longer fit together
// (when it is found on a device: Note [Frames on a device]).
// Bytes sent per rank: 2 r S, r S with two ranks, plus 32 bytes of frame per message; S is that of
// the bucket in f32.
class CompressedGossip final : public BucketOp {
 public:
  CompressedGossip(std::shared_ptr<Communicator> communicator, std::shared_ptr<const Codec> codec,
                   std::shared_ptr<Scratch> scratch, Replicas replicas, MixingWeights mixing,
                   Checksum checksum = Checksum::kOff);
  void run(at::Tensor& flat, const Round& round) override;
  std::string describe() const override;

 private:
  struct Work;
  void check(const at::Tensor& flat, const Round& round) const;
  void encode(const Work& work, int64_t first_tile, int64_t end_tile) const;
  void apply(const Work& work, int64_t first_tile, int64_t end_tile) const;

  FramedExchange exchange_;
  std::shared_ptr<const Codec> codec_;
  std::shared_ptr<Scratch> scratch_;
  Replicas replicas_;
  MixingWeights mixing_;
};

}  // namespace bagua
