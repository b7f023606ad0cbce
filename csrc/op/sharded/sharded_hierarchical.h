// Hierarchical, with every rank of a node communicating a share of the bucket between nodes.
#pragma once

#include <memory>
#include <string>
#include <vector>

#include "codec/plain_sum.h"
#include "comm/communicator.h"
#include "ledger/scratch.h"
#include "op/contract/bucket_op.h"
#include "op/hierarchical.h"

namespace bagua {

// For nodes whose ranks have a network card each, or more than one core to encode with:
// Hierarchical leaves the exchange between nodes to one rank of each. The bucket is cut into as
// many shares as the largest node has ranks. In a node of n ranks share s is of rank s mod n, so
// that ranks of smaller nodes have several. Steps:
//   1. every rank sends its version of each share to the share's rank in its node, which adds them
//      in f32 (f64 for f64), in rank order, and scales the sum so that the inner op's mean over
//      nodes is the mean over all ranks;
//   2. for each of its shares, in ascending order, a rank runs that share's inner op with the ranks
//      of the other nodes that have it;
//   3. every rank sends its shares to the other ranks of its node.
// Ascending order keeps ranks with several shares free of deadlock: the ranks of the lowest share
// that is not done have done all lower ones. All ranks hold the same bits afterwards, as the inner
// op leaves the same bits in all nodes. When all ranks share one node they are reduced exactly.
//
// Bytes sent by a rank: the inner ops' of its shares between nodes: as those of a leader of
// Hierarchical, divided by the ranks of the node where nodes are of equal size; and 2 S (n - 1) / n
// inside a node of n ranks, for S bytes.
class ShardedHierarchical final : public BucketOp {
 public:
  // `inner`: one op for each share, the same number on all ranks; null for shares of other ranks of
  // the node. Empty where there is one node. `kernel`: adds the versions of all shares at once, in
  // place of ATen's operations; of buckets that have a DType. Null on CPU.
  ShardedHierarchical(std::shared_ptr<Communicator> node,
                      std::vector<std::shared_ptr<BucketOp>> inner,
                      std::shared_ptr<Scratch> scratch, NodeShare share,
                      std::shared_ptr<const PlainSum> kernel = nullptr);
  void run(at::Tensor& flat, const Round& round) override;
  std::string describe() const override;

 private:
  // Share `number` of a bucket; empty at the end of a small one.
  at::Tensor share_of(const at::Tensor& reals, int64_t number) const;
  int owner(int64_t number) const;
  void reduce(const at::Tensor& reals);
  // The version that a rank of the node has of share `number`, which is `share` and this rank's.
  // `versions`: rows of `stride` elements, by share, then by rank.
  at::Tensor version_of(const at::Tensor& versions, int64_t stride, const at::Tensor& share,
                        int64_t number, int rank) const;
  // The sum of all versions of each share of this rank, scaled.
  void add_at_once(const at::Tensor& reals, const at::Tensor& versions, int64_t stride,
                   double divisor, double weight);
  void add_one_by_one(const at::Tensor& reals, const at::Tensor& versions, int64_t stride,
                      double divisor, double weight);
  void distribute(const at::Tensor& reals);

  std::shared_ptr<Communicator> node_;
  std::vector<std::shared_ptr<BucketOp>> inner_;
  std::shared_ptr<Scratch> scratch_;
  NodeShare share_;
  std::shared_ptr<const PlainSum> kernel_;
};

}  // namespace bagua
