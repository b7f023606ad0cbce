// The sum of a bucket over all ranks, of which every rank gets one part, with compressed bytes on
// the wire.
#pragma once

#include <memory>
#include <optional>
#include <string>

#include "codec/codec.h"
#include "comm/communicator.h"
#include "ledger/error_feedback.h"
#include "ledger/round_memory.h"
#include "ledger/scratch.h"
#include "op/contract/bucket_op.h"
#include "op/wire/bucket_parts.h"
#include "op/wire/framed_exchange.h"

namespace bagua {

// The first half of CompressedAllReduce. The bucket is cut into one part per rank, all of one size:
//   1. encode the other ranks' parts;
//   2. exchange: part p goes to rank p, every rank sends me its version of my part;
//   3. reduce my part, tile by tile, as each segment has arrived from all ranks: add all versions
//   in
//      f32, in rank order, mine unchanged; divide by `divisor` and convert to the bucket's dtype.
// Afterwards part `rank` of the bucket has the result; the others are undefined.
//
// With a memory there is error feedback, as in ErrorFeedback: m = g / s + e is what steps 1 to 3
// take, for the round's grad_scale s, and the result is multiplied by s. Afterwards e is what the
// other ranks' parts have lost, m - decoded; zeros for my own part, which loses nothing. Every rank
// has one part of the result only, so the ranks tell each other whether theirs are finite: the
// memory changes on all ranks or on none (Note [Memory commits with the round]). m is f32.
//
// Bytes sent per rank: r S (P - 1) / P for S bytes, P ranks and payload ratio r, plus 32 bytes of
// frame per message; with a memory and an all_reduce of 4 bytes. Buckets of f64 are cast to f32.
// Codec and device: as in CompressedAllReduce.
class CompressedReduceScatter final : public BucketOp {
 public:
  // `divisor`: 1 for the sum, the number of ranks for the mean. `memory`: null for none; otherwise
  // that of ErrorFeedback, of f32. Throws std::invalid_argument for a memory of another form or a
  // divisor that is not a positive number; run() for a bucket that the ranks do not divide, or that
  // does not fit the memory.
  CompressedReduceScatter(std::shared_ptr<Communicator> communicator,
                          std::shared_ptr<const Codec> codec, std::shared_ptr<Scratch> scratch,
                          double divisor, std::shared_ptr<RoundMemory> memory,
                          Checksum checksum = Checksum::kOff);
  void run(at::Tensor& flat, const Round& round) override;
  std::string describe() const override;

 private:
  void remember(const BucketParts& parts, const at::Tensor& result, const Round& round);

  std::shared_ptr<Communicator> communicator_;
  FramedExchange exchange_;
  std::shared_ptr<const Codec> codec_;
  std::shared_ptr<Scratch> scratch_;
  double divisor_;
  std::optional<ErrorFeedback> feedback_;
};

}  // namespace bagua
