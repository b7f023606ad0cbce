// All ranks' parts of a bucket on every rank, with compressed bytes on the wire.
#pragma once

#include <memory>
#include <string>

#include "codec/codec.h"
#include "comm/communicator.h"
#include "ledger/scratch.h"
#include "op/contract/bucket_op.h"
#include "op/wire/framed_exchange.h"

namespace bagua {

// The second half of CompressedAllReduce. Part p of the bucket, of one size for all, is rank p's:
//   1. encode my part, and decode it in its place;
//   2. exchange: my part goes to every rank; decode the others' as they arrive.
// All ranks decode the same bytes, so they hold the same bits. With one rank nothing is done.
//
// Bytes sent per rank: r S (P - 1) / P for S bytes, P ranks and payload ratio r, plus 32 bytes of
// frame per message. Buckets of f64 are cast to f32. Codec and device: as in CompressedAllReduce.
class CompressedAllGather final : public BucketOp {
 public:
  // run() throws std::invalid_argument for a bucket that the ranks do not divide.
  CompressedAllGather(std::shared_ptr<Communicator> communicator,
                      std::shared_ptr<const Codec> codec, std::shared_ptr<Scratch> scratch,
                      Checksum checksum = Checksum::kOff);
  void run(at::Tensor& flat, const Round& round) override;
  std::string describe() const override;

 private:
  FramedExchange exchange_;
  std::shared_ptr<const Codec> codec_;
  std::shared_ptr<Scratch> scratch_;
};

}  // namespace bagua
