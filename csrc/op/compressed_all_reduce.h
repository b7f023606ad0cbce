// The sum or mean of a bucket over all ranks, with compressed bytes on the wire.
#pragma once

#include <memory>
#include <string>

#include "codec/codec.h"
#include "comm/communicator.h"
#include "op/contract/bucket_op.h"
#include "op/memory/scratch.h"
#include "op/wire/bucket_parts.h"
#include "op/wire/framed_exchange.h"

namespace bagua {

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
// Bytes sent per rank: 2 r S (P - 1) / P for S bytes, P ranks and payload ratio r, plus 32 bytes of
// frame per message. With one rank nothing is done. Buckets of f64 are cast to f32 for the wire.
// The codec is of the bucket's device, where everything is ordered on the current stream; see Note
// [Frames on a device] for when a peer's mismatch is found there.
class CompressedAllReduce final : public BucketOp {
 public:
  CompressedAllReduce(std::shared_ptr<Communicator> communicator,
                      std::shared_ptr<const Codec> codec, std::shared_ptr<Scratch> scratch,
                      ReduceOp op, Checksum checksum = Checksum::kOff);
  void run(at::Tensor& flat, const Round& round) override;
  std::string describe() const override;

 private:
  void reduce(const BucketParts& parts, const at::Tensor& sum, int64_t first_tile,
              int64_t end_tile) const;

  FramedExchange exchange_;
  std::shared_ptr<const Codec> codec_;
  std::shared_ptr<Scratch> scratch_;
  ReduceOp op_;
};

}  // namespace bagua
