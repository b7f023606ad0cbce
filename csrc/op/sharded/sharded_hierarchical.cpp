#include "op/sharded/sharded_hierarchical.h"

#include <algorithm>
#include <utility>

#include "base/check.h"
#include "comm/device_stream.h"
#include "op/tensors/arithmetic_dtype.h"
#include "op/tensors/reals.h"
#include "op/wire/bucket_parts.h"
#include "op/wire/codec_calls.h"

namespace bagua {

ShardedHierarchical::ShardedHierarchical(std::shared_ptr<Communicator> node,
                                         std::vector<std::shared_ptr<BucketOp>> inner,
                                         std::shared_ptr<Scratch> scratch, NodeShare share,
                                         std::shared_ptr<const PlainSum> kernel)
    : node_(std::move(node)),
      inner_(std::move(inner)),
      scratch_(std::move(scratch)),
      share_(share),
      kernel_(std::move(kernel)) {
  const Group group = node_->group();
  BAGUA_CHECK_ARG(share_.nodes == 1 || static_cast<int>(inner_.size()) >= group.size,
                  "ShardedHierarchical: ", inner_.size(), " shares for a node of ", group.size,
                  " ranks; there is one for each rank of the largest node.");
  for (size_t number = 0; number < inner_.size(); ++number) {
    const bool mine = owner(static_cast<int64_t>(number)) == group.rank;
    BAGUA_CHECK_ARG(mine == (inner_[number] != nullptr), "ShardedHierarchical: share ", number,
                    mine ? " is" : " is not", " of rank ", group.rank, " of ", group.size,
                    " in its node, which ", mine ? "needs an" : "takes no", " inner op for it.");
  }
}

int ShardedHierarchical::owner(int64_t number) const {
  return static_cast<int>(number % node_->group().size);
}

at::Tensor ShardedHierarchical::share_of(const at::Tensor& reals, int64_t number) const {
  const int64_t stride = part_stride(reals.numel(), static_cast<int>(inner_.size()));
  const int64_t first = std::min(reals.numel(), number * stride);
  return reals.narrow(0, first, std::min(stride, reals.numel() - first));
}

void ShardedHierarchical::run(at::Tensor& flat, const Round& round) {
  at::Tensor reals = reals_of(flat);
  if (share_.nodes == 1) {
    if (node_->group().size > 1) node_->all_reduce(reals, share_.op);
    return;
  }
  // 1.
  reduce(reals);
  // 2.
  for (size_t number = 0; number < inner_.size(); ++number) {
    at::Tensor share = share_of(reals, static_cast<int64_t>(number));
    if (inner_[number] && share.numel() > 0) inner_[number]->run(share, round);
  }
  // 3.
  distribute(reals);
}

at::Tensor ShardedHierarchical::version_of(const at::Tensor& versions, int64_t stride,
                                           const at::Tensor& share, int64_t number,
                                           int rank) const {
  const int size = node_->group().size;
  return versions.narrow(0, (number / size * size + rank) * stride, share.numel());
}

void ShardedHierarchical::reduce(const at::Tensor& reals) {
  const Group node = node_->group();
  const auto shares = static_cast<int64_t>(inner_.size());
  const int64_t stride = part_stride(reals.numel(), static_cast<int>(shares));
  const int64_t own = (shares - node.rank + node.size - 1) / node.size;
  // The other ranks' versions of this rank's shares, by share, then by rank.
  at::Tensor versions = scratch_->get(Scratch::kReceive, own * node.size * stride,
                                      reals.scalar_type(), reals.device());
  std::vector<Send> sends;
  std::vector<Recv> receives;
  for (int64_t number = 0; number < shares; ++number) {
    if (share_of(reals, number).numel() == 0) continue;
    if (owner(number) != node.rank) {
      sends.push_back({share_of(reals, number), owner(number)});
      continue;
    }
    for (int rank = 0; rank < node.size; ++rank) {
      if (rank != node.rank) {
        receives.push_back(
            {version_of(versions, stride, share_of(reals, number), number, rank), rank});
      }
    }
  }
  if (node.size > 1) node_->exchange(sends, receives);
  const double of_mean = static_cast<double>(node.size) * share_.nodes / share_.ranks;
  const double weight = share_.op == ReduceOp::kAvg ? of_mean : 1.0;
  const double divisor = share_.op == ReduceOp::kAvg ? node.size : 1.0;
  if (kernel_ && at::isFloatingType(reals.scalar_type()) && reals.scalar_type() != at::kDouble) {
    return add_at_once(reals, versions, stride, divisor, weight);
  }
  add_one_by_one(reals, versions, stride, divisor, weight);
}

void ShardedHierarchical::add_at_once(const at::Tensor& reals, const at::Tensor& versions,
                                      int64_t stride, double divisor, double weight) {
  const Group node = node_->group();
  auto* const rows = static_cast<std::byte*>(versions.data_ptr());
  const int64_t row_bytes = stride * reals.element_size();
  std::vector<Chunk> chunks;
  for (int64_t number = node.rank; number < static_cast<int64_t>(inner_.size());
       number += node.size) {
    const at::Tensor share = share_of(reals, number);
    const at::Tensor first = version_of(versions, stride, share, number, 0);
    chunks.push_back({share.data_ptr(), static_cast<std::byte*>(first.data_ptr()), share.numel()});
  }
  kernel_->sum(
      chunks,
      {.results = rows, .first = rows, .stride = row_bytes, .rows = node.size, .own = node.rank},
      {.divisor = static_cast<float>(divisor), .factor = static_cast<float>(weight)},
      codec_dtype(reals.scalar_type()), current_stream_handle(reals.device()));
}

void ShardedHierarchical::add_one_by_one(const at::Tensor& reals, const at::Tensor& versions,
                                         int64_t stride, double divisor, double weight) {
  const Group node = node_->group();
  for (int64_t number = node.rank; number < static_cast<int64_t>(inner_.size());
       number += node.size) {
    at::Tensor share = share_of(reals, number);
    at::Tensor total = scratch_->get(Scratch::kSum, share.numel(),
                                     arithmetic_dtype(share.scalar_type()), share.device());
    total.zero_();
    for (int rank = 0; rank < node.size; ++rank) {
      total.add_(rank == node.rank ? share : version_of(versions, stride, share, number, rank));
    }
    if (divisor != 1.0) total.div_(divisor);
    if (weight != 1.0) total.mul_(weight);
    share.copy_(total);
  }
}

void ShardedHierarchical::distribute(const at::Tensor& reals) {
  const Group node = node_->group();
  if (node.size == 1) return;
  std::vector<Send> sends;
  std::vector<Recv> receives;
  for (int64_t number = 0; number < static_cast<int64_t>(inner_.size()); ++number) {
    const at::Tensor share = share_of(reals, number);
    if (share.numel() == 0) continue;
    if (owner(number) != node.rank) {
      receives.push_back({share, owner(number)});
      continue;
    }
    for (int rank = 0; rank < node.size; ++rank) {
      if (rank != node.rank) sends.push_back({share, rank});
    }
  }
  node_->exchange(sends, receives);
}

std::string ShardedHierarchical::describe() const {
  std::string text =
      concat("ShardedHierarchical(", share_.nodes, " nodes, ", inner_.size(), " shares");
  for (const std::shared_ptr<BucketOp>& op : inner_) {
    if (op) return concat(text, ", ", op->describe(), ")");
  }
  return text + ")";
}

}  // namespace bagua
