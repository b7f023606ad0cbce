// The weighted mean of a bucket with those of the neighbours in a graph of ranks.
#pragma once

#include <memory>
#include <vector>

#include "comm/communicator.h"
#include "ledger/scratch.h"
#include "op/contract/bucket_op.h"

namespace bagua {

// One rank's share in a mean.
struct MixingTerm {
  int rank;
  double weight;
};

// Mixing with a matrix W whose row is `own_weight` and the neighbours' weights (D-PSGD: X. Lian et
// al., NeurIPS 2017, with the graph as given). On CPU segment by segment, so that little memory is
// needed; on a device the bucket is one segment:
//   1. post the receives from all neighbours, then the sends to them: no graph in which neighbours
//      are mutual can deadlock;
//   2. segment = sum of w_j x_j over the rank itself and its neighbours, in rank order, in f32 (f64
//      for f64), rounded once to the bucket's dtype.
// Ranks whose sums have the same terms, as all of a complete graph, hold the same bits. Where W is
// symmetric, the mean over all ranks is unchanged.
//
// All ranks run it with buckets of the same size, and neighbours list each other. May fail:
// std::invalid_argument for neighbours outside the group, repeated neighbours, weights
// that are not finite or do not add up to 1, and a bucket that is not floating point. A failure of
// the transport may leave earlier segments averaged. Bytes sent per rank: S for each neighbour.
class NeighborAverage final : public BucketOp {
 public:
  NeighborAverage(std::shared_ptr<Communicator> communicator, double own_weight,
                  std::vector<MixingTerm> neighbors, std::shared_ptr<Scratch> scratch);
  void run(at::Tensor& flat, const Round& round) override;
  std::string describe() const override;

 private:
  void mix(at::Tensor& segment, const at::Tensor& received);

  std::shared_ptr<Communicator> communicator_;
  std::vector<MixingTerm> terms_;  // of the rank itself too, by rank
  std::shared_ptr<Scratch> scratch_;
};

}  // namespace bagua
