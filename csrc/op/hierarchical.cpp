#include "op/hierarchical.h"

#include <utility>

#include "base/check.h"
#include "op/tensors/reals.h"
#include "op/wire/bucket_parts.h"

namespace bagua {

Hierarchical::Hierarchical(std::shared_ptr<Communicator> node, std::shared_ptr<BucketOp> inner,
                           NodeShare share, std::optional<ResultPayloads> payloads)
    : node_(std::move(node)),
      inner_(std::move(inner)),
      share_(share),
      payloads_(std::move(payloads)) {
  const bool leads = node_->group().rank == 0;
  BAGUA_CHECK_ARG(!leads || inner_ || share_.nodes == 1,
                  "Hierarchical: the leader of a node needs the inner op when there are ",
                  share_.nodes, " nodes.");
}

void Hierarchical::run(at::Tensor& flat, const Round& round) {
  const Group node = node_->group();
  at::Tensor reals = reals_of(flat);
  // 1.
  if (node.size > 1) node_->all_reduce(reals, share_.op);
  if (share_.nodes == 1) return;
  // 2.
  if (node.rank == 0) {
    const double weight = static_cast<double>(node.size) * share_.nodes / share_.ranks;
    if (share_.op == ReduceOp::kAvg && weight != 1.0) flat.mul_(weight);
    inner_->run(flat, round);
  }
  // 3.
  if (node.size == 1) return;
  if (payloads_ && flat.scalar_type() != at::kDouble) return broadcast_payloads(flat);
  node_->broadcast(reals, 0);
}

// The leaders' group decides the parts; on a leader the rows are those that its inner op has
// filled.
void Hierarchical::broadcast_payloads(const at::Tensor& flat) {
  if (flat.numel() == 0) return;
  const BucketParts parts =
      cut(flat, {.rank = 0, .size = share_.nodes}, *payloads_->codec, *payloads_->scratch);
  at::Tensor payloads = parts.send.bytes;
  node_->broadcast(payloads, 0);
  if (node_->group().rank != 0) decode_all(parts);
}

std::string Hierarchical::describe() const {
  return concat("Hierarchical(", share_.nodes, " nodes, ",
                inner_ ? inner_->describe() : std::string("follows its leader"), ")");
}

}  // namespace bagua
