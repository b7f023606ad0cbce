// The mean of the largest elements of each chunk, in two bits, with a residual that decays.
#pragma once

#include <cstdint>
#include <memory>
#include <string>

#include "comm/communicator.h"
#include "ledger/feedback.h"
#include "ledger/round_memory.h"
#include "ledger/scratch.h"
#include "op/contract/bucket_op.h"
#include "op/wire/chunked_message.h"
#include "op/wire/framed_exchange.h"

namespace bagua {

struct ChunkedSparseRule {
  int64_t k;      // elements that a chunk sends, of kSparseChunkNumel
  double decay;   // of the residual, from one round to the next
  int64_t numel;  // of the bucket; what is behind them is padding, and becomes zero
};

// SparseLoCo (A. Sarfi et al., *Communication Efficient LLM Pre-training with SparseLoCo*, 2025).
// Steps, with g the bucket, e the residual and P the number of ranks:
//   1. p = decay e + g, the product and the sum rounded by themselves;
//   2. of each chunk c = the k elements of p of largest magnitude, as their codes decode;
//      e <- p - c;
//   3. all_gather of the codes and their indices;
//   4. sum what all ranks sent, in order of ranks;
//   5. g <- sum / P, zero where no rank has sent.
// Every rank sums the same bytes in the same order and holds the same bits afterwards. A value that
// is not finite is larger than all others, so it is sent, makes its block NaN on all ranks, and no
// memory changes. With one rank g <- p, and e <- 0: nothing need be lost.
//
// The memory's tensors are e, of the bucket's dtype and as long, and the number of communications,
// one int64. Buckets are of float32 or float64, on the CPU. May fail: MismatchError, naming the
// peer, for a message of another plan or round and for one that is damaged. Bytes sent per rank:
// P - 1 times ChunkedMessage::bytes().
class ChunkedSparse final : public BucketOp {
 public:
  // Throws std::invalid_argument for memory of another form, and a rule out of its range.
  ChunkedSparse(std::shared_ptr<Communicator> communicator, std::shared_ptr<Scratch> scratch,
                ChunkedSparseRule rule, std::shared_ptr<RoundMemory> memory,
                Checksum checksum = Checksum::kOff);
  void run(at::Tensor& flat, const Round& round) override;
  std::string describe() const override;

 private:
  void check(const at::Tensor& flat, const Round& round);
  void exchange(at::Tensor& flat, const Round& round);

  FramedExchange exchange_;
  std::shared_ptr<Scratch> scratch_;
  ChunkedSparseRule rule_;
  ChunkedMessage layout_;
  Feedback feedback_;
};

}  // namespace bagua
