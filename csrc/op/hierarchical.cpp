#include "op/hierarchical.h"

#include <utility>

#include "base/check.h"
#include "op/tensors/reals.h"

namespace bagua {

Hierarchical::Hierarchical(std::shared_ptr<Communicator> node, std::shared_ptr<BucketOp> inner,
                           NodeShare share)
    : node_(std::move(node)), inner_(std::move(inner)), share_(share) {
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
  if (node.size > 1) node_->broadcast(reals, 0);
}

std::string Hierarchical::describe() const {
  return concat("Hierarchical(", share_.nodes, " nodes, ",
                inner_ ? inner_->describe() : std::string("follows its leader"), ")");
}

}  // namespace bagua
