// The sum or mean of a bucket over all ranks, with compressed bytes on the wire.
#pragma once

#include <memory>
#include <optional>
#include <string>

#include "codec/codec.h"
#include "comm/communicator.h"
#include "ledger/feedback.h"
#include "ledger/round_memory.h"
#include "ledger/scratch.h"
#include "op/contract/bucket_op.h"
#include "op/wire/bucket_parts.h"
#include "op/wire/framed_exchange.h"

namespace bagua {

// Memory of a CompressedAllReduce with error feedback. Ownership: shared with the algorithm.
struct TwoResiduals {
  // Tensors 0 and 2 are of f32 or, for buckets of f64, of f64: what this rank's values lose, as
  // long as the bucket, and what the mean of its part loses, as long as that. Tensor 1 is the
  // number of communications.
  std::shared_ptr<RoundMemory> memory;
  int64_t padding = 0;  // elements at the end of the bucket without meaning
  // Connects the ranks whose buckets are other shards of the same gradients. They tell each other
  // whether their results are finite, so that residuals change for all shards or for none; null:
  // none.
  std::shared_ptr<Communicator> shards = nullptr;
};

// Bagua's scatter-gather all-reduce. The bucket is cut into one part per rank:
//   1. encode the other ranks' parts;
//   2. exchange: part p goes to rank p, every rank sends me its version of my part;
//   3. reduce my part, tile by tile, as each segment has arrived from all ranks: encode my own
//      version, decode all versions and add them in f32, in rank order; divide by the world size
//      (mean) and convert to the bucket's dtype;
//   4. encode the result, and decode it into my part;
//   5. exchange: my part goes to every rank; decode the others' parts as they arrive.
// All ranks decode the same bytes in the end, so they hold the same bits. Step 3 also encodes and
// decodes this rank's own version: all versions weigh alike, as in Bagua.
//
// With residuals there is error feedback on both sides (Tang et al., DoubleSqueeze, ICML 2019),
// with s the round's grad_scale and g the bucket:
//   1. p = g / s + e; encode all parts, this rank's own too; e <- p - decoded;
//   3. and 4. q = the mean of the decoded versions of my part, plus my server residual; encode q;
//      the server residual <- q - decoded;
//   5. and decode as before; g <- s times the decoded mean (P times that for the sum).
// Over the rounds nothing is lost: the sum of the means of all g / s is that of the results plus
// the mean of e plus the server residuals side by side. Server residuals are in units of the mean,
// so that they keep their meaning where the number of ranks changes. Residuals of f64 hold what the
// cast to f32 loses, too, and versions are then added in f64. The residuals of padding are
// zero. A result that is not finite leaves both unchanged: all ranks hold the same result, and
// decide alike (Note [Memory commits with the round]). With one rank, residuals of a checkpoint of
// more ranks are added to the bucket and become zero.
//
// Bytes sent per rank: 2 r S (P - 1) / P for S bytes, P ranks and payload ratio r, plus 32 bytes of
// frame per message. Where `shards` is given they make an all_reduce of 4 bytes beside it. With one
// rank nothing else is done. Buckets of f64 are cast to f32 for the wire. The codec is of the
// bucket's device, where everything is ordered on the current stream; see Note [Frames on a device]
// for when a peer's mismatch is found there.
class CompressedAllReduce final : public BucketOp {
 public:
  CompressedAllReduce(std::shared_ptr<Communicator> communicator,
                      std::shared_ptr<const Codec> codec, std::shared_ptr<Scratch> scratch,
                      ReduceOp op, Checksum checksum = Checksum::kOff,
                      std::optional<TwoResiduals> residuals = std::nullopt);
  // Throws std::invalid_argument, naming the bucket, where it does not fit the residuals.
  void run(at::Tensor& flat, const Round& round) override;
  std::string describe() const override;

 private:
  struct BothSides {
    Feedback worker;
    Feedback server;
    int64_t padding;
    std::shared_ptr<Communicator> shards;
  };

  void reduce(const BucketParts& parts, const at::Tensor& sum, int64_t first_tile,
              int64_t end_tile) const;
  void run_with_residuals(at::Tensor& flat, const Round& round);
  OnTiles reduce_with_residuals(const BucketParts& parts, const at::Tensor& results);
  OnTiles reduce_in_f64(const BucketParts& parts, const at::Tensor& results);
  void check_fits(const at::Tensor& flat, const Round& round);
  void leave(const at::Tensor& flat, const Round& round);

  FramedExchange exchange_;
  std::shared_ptr<const Codec> codec_;
  std::shared_ptr<Scratch> scratch_;
  ReduceOp op_;
  std::optional<BothSides> residuals_;
};

}  // namespace bagua
