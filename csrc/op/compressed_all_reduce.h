// The sum or mean of a bucket over all ranks, with compressed bytes on the wire.
#pragma once

#include <memory>

#include "codec/codec.h"
#include "comm/communicator.h"
#include "op/bucket_op.h"
#include "op/part_layout.h"
#include "op/scratch.h"

namespace bagua {

// Bagua's scatter-gather all-reduce. The bucket is cut into one part per rank:
//   1. encode every part;
//   2. send part p to rank p (all_to_all);
//   3. decode all ranks' versions of my part and add them in f32, in rank order;
//   4. divide by the number of ranks (mean), convert to the bucket's dtype, encode;
//   5. send my part to every rank (all_gather);
//   6. decode every part into the bucket, mine too.
// All ranks decode the same bytes in step 6, so they end with the same bits.
//
// Bytes sent per rank: 2 r S (P - 1) / P for S bytes, P ranks and payload ratio r, plus 32 bytes of
// frame per message. With one rank nothing is done. Buckets of f64 are cast to f32 for the wire.
class CompressedAllReduce final : public BucketOp {
 public:
  CompressedAllReduce(std::shared_ptr<Communicator> communicator,
                      std::shared_ptr<const Codec> codec, std::shared_ptr<Scratch> scratch,
                      ReduceOp op);
  void run(at::Tensor& flat, const Round& round) override;
  std::string describe() const override;

 private:
  struct Job;
  void encode_all(Job& job) const;
  void scatter(Job& job) const;
  void reduce_own(Job& job) const;
  void gather(Job& job) const;
  void decode_all(Job& job) const;

  std::shared_ptr<Communicator> communicator_;
  std::shared_ptr<const Codec> codec_;
  std::shared_ptr<Scratch> scratch_;
  ReduceOp op_;
};

}  // namespace bagua
