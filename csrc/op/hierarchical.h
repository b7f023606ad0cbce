// Exact mean inside a node, another op between nodes.
#pragma once

#include <memory>
#include <optional>

#include "codec/codec.h"
#include "comm/communicator.h"
#include "ledger/scratch.h"
#include "op/contract/bucket_op.h"

namespace bagua {

// Role of a rank in its node and of the node among all ranks.
struct NodeShare {
  int ranks;    // in all nodes together
  int nodes;    // number of nodes
  ReduceOp op;  // kAvg: the mean over all ranks, whatever the sizes of the nodes
};

// Where an inner op leaves the payloads that its result is decoded from, as CompressedAllReduce
// does without residuals: all parts, in the rows to send of its scratch.
struct ResultPayloads {
  std::shared_ptr<const Codec> codec;
  std::shared_ptr<Scratch> scratch;  // that of the inner op; on other ranks than leaders, any
};

// Steps:
//   1. all_reduce inside the node (exact);
//   2. leaders, when there is more than one node: scale by node_size * nodes / ranks, so that the
//      inner op's mean over leaders is the mean over all ranks; run the inner op;
//   3. the leader (rank 0 of the node) broadcasts the result inside the node: itself or, with
//      `payloads`, what it was decoded from, which the others decode to the leader's bits.
// Nothing is compressed or gossiped when all ranks share one node.
//
// `inner` is null on ranks other than leaders. Bytes sent: the inner op's between nodes, plus
// 2 S (n - 1) / n and the broadcast inside a node of n ranks, of S bytes or of the payloads.
// Buckets of f64, whose result a cast follows, are broadcast themselves.
class Hierarchical final : public BucketOp {
 public:
  Hierarchical(std::shared_ptr<Communicator> node, std::shared_ptr<BucketOp> inner, NodeShare share,
               std::optional<ResultPayloads> payloads = std::nullopt);
  void run(at::Tensor& flat, const Round& round) override;
  std::string describe() const override;

 private:
  void broadcast_payloads(const at::Tensor& flat);

  std::shared_ptr<Communicator> node_;
  std::shared_ptr<BucketOp> inner_;
  NodeShare share_;
  std::optional<ResultPayloads> payloads_;
};

}  // namespace bagua
