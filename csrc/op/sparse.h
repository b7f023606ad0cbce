// The mean of the largest elements of a bucket, with error feedback.
#pragma once

#include <memory>

#include "codec/sparse_codec.h"
#include "comm/communicator.h"
#include "ledger/error_feedback.h"
#include "ledger/late_values.h"
#include "op/wire/framed_exchange.h"
#include "op/wire/sparse_message.h"

namespace bagua {

// Top-k sparsification (Stich et al., *Sparsified SGD with Memory*, NeurIPS 2018, Algorithm 1).
// Steps, with m and e as in ledger/error_feedback.h:
//   1. m = g / s + e;
//   2. c = the k elements of m of largest magnitude, exactly; e <- m - c;
//   3. all_gather of c, as values and indices;
//   4. sum what all ranks sent, in order of ranks;
//   5. g <- sum * s / P.
// Every rank sums the same bytes in the same order and holds the same bits afterwards. A value that
// is not finite is larger than all others, so it is sent, seen by all ranks, and no memory changes.
//
// May fail: MismatchError, naming the peer, for a message of another plan or round and for one that
// is damaged (on a device: in the round after). Bytes sent per rank: P - 1 times
// SparseMessage::bytes().
class Sparse final : public BucketOp {
 public:
  // `numel`: elements of the bucket; 1 <= k <= numel (0 if it is empty).
  struct Options {
    Checksum checksum = Checksum::kOff;
    std::shared_ptr<const SparseCodec> device{};  // null: the CUDA kernels of this build
  };
  Sparse(std::shared_ptr<Communicator> communicator, std::shared_ptr<Scratch> scratch,
         int64_t numel, int64_t k, std::shared_ptr<RoundMemory> memory, Options options);
  void run(at::Tensor& flat, const Round& round) override;
  std::string describe() const override;

 private:
  void exchange(at::Tensor& m, at::Tensor& sum, const Round& round);
  void exchange_on_device(at::Tensor& m, at::Tensor& sum, const Round& round);
  uint64_t fingerprint(const SparseMessage& layout, const at::Tensor& m, const Round& round) const;
  void check_earlier(const SparseMessage& layout, const Round& round);

  FramedExchange exchange_;
  std::shared_ptr<Scratch> scratch_;
  int64_t k_;
  ErrorFeedback feedback_;
  std::shared_ptr<const SparseCodec> codec_;
  LateValues faults_;  // on a device: of the round before, by rank
};

}  // namespace bagua
