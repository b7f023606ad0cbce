// The sum or mean of a bucket over all ranks, with compressed bytes on the wire.
#pragma once

#include <memory>

#include "codec/codec.h"
#include "comm/communicator.h"
#include "op/contract/bucket_op.h"
#include "op/memory/scratch.h"
#include "op/wire/message_frames.h"
#include "op/wire/part_layout.h"

namespace bagua {

// Bagua's scatter-gather all-reduce. The bucket is cut into one part per rank:
//   1. encode the other ranks' parts;
//   2. send part p to rank p (all_to_all), and as each segment of my part arrives from all ranks:
//      a. encode my own version, decode all versions and add them in f32, in rank order;
//      b. divide by the number of ranks (mean), convert to the bucket's dtype;
//      c. encode the result, and decode it into my part;
//   3. send my part to every rank (all_gather), and decode each segment as it arrives.
// All ranks decode the same bytes in the end, so they hold the same bits. Step 2 also encodes and
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
  struct Job;
  void encode_others(Job& job);
  void scatter(Job& job);
  void reduce(Job& job, int64_t first_piece, int64_t end_piece) const;
  void gather(Job& job);

  std::shared_ptr<Communicator> communicator_;
  std::shared_ptr<const Codec> codec_;
  std::shared_ptr<Scratch> scratch_;
  ReduceOp op_;
  Checksum checksum_;
  DeviceFrames device_frames_;  // unused on CPU
};

}  // namespace bagua
