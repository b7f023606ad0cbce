// Averages a bucket with one scheduled peer per round.
#pragma once

#include <cstdint>
#include <memory>
#include <vector>

#include "comm/communicator.h"
#include "ledger/scratch.h"
#include "op/contract/bucket_op.h"

namespace bagua {

// The partner of `rank` in pairwise averaging at `step` (0, 1, 2, ...). Partners are mutual. Throws
// std::invalid_argument for a rank outside [0, size) or a negative step.
//
// Even size, h = size / 2: ranks below h meet ranks from h on, shifted by one each step (Bagua's
// "shift_one"; period h):
//   rank <  h: (step + rank) mod h + h
//   rank >= h: (rank - h - step) mod h
// Odd size: (step - rank) mod size. Exactly one rank is its own partner and sits this step out:
// the one with 2 * rank = step (mod size). In `size` steps every rank sits out once and meets every
// other rank once.
int shift_one_peer(int rank, int size, int64_t step);

// Pairwise averaging (Bagua, VLDB 2022, decentralized training with "shift_one" peers):
//   1. the peer is shift_one_peer(rank, size, communications); with an odd size one rank is its own
//      peer, and keeps its values;
//   2. exchange the bucket with the peer;
//   3. bucket = (own + received) / 2, or, where a member stands for weights[member] ranks,
//      (weights[own] * own + weights[peer] * received) / (weights[own] + weights[peer]).
// Both peers end bit-identical; the global mean is unchanged.
//
// Reads `communications` (one int64 in CPU memory, equal on all ranks) and leaves the
// counting to AverageWeights. May fail: std::invalid_argument for weights that do not fit.
// Bytes sent per rank: S for a bucket of S bytes.
class Gossip final : public BucketOp {
 public:
  Gossip(std::shared_ptr<Communicator> communicator, at::Tensor communications,
         std::vector<int> weights, std::shared_ptr<Scratch> scratch);
  void run(at::Tensor& flat, const Round& round) override;
  std::string describe() const override;

 private:
  std::shared_ptr<Communicator> communicator_;
  at::Tensor communications_;
  std::vector<int> weights_;
  std::shared_ptr<Scratch> scratch_;
};

}  // namespace bagua
