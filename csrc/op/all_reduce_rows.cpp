#include "op/all_reduce_rows.h"

#include <algorithm>
#include <limits>
#include <utility>

#include <ATen/ops/_sparse_coo_tensor_unsafe.h>
#include <ATen/ops/cat.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/full.h>
#include <ATen/ops/stack.h>

#include "base/check.h"
#include "op/tensors/all_finite.h"

namespace bagua {
namespace {

// Alignment of the sections of a message, so that every dtype may be read in place.
constexpr int64_t kAlignment = 16;

int64_t aligned(int64_t bytes) { return (bytes + kAlignment - 1) / kAlignment * kAlignment; }

// `rows` rows begin the message of a rank that has them.
struct Message {
  at::Tensor bytes;
  int64_t most;  // rows, on the rank that has most
  int64_t row_bytes;

  static int64_t size(int64_t most, int64_t row_bytes) {
    return aligned(most * 8) + aligned(most * row_bytes);
  }
  at::Tensor indices(int64_t rows) const { return bytes.narrow(0, 0, rows * 8).view(at::kLong); }
  at::Tensor values(int64_t rows, at::ScalarType dtype) const {
    return bytes.narrow(0, aligned(most * 8), rows * row_bytes).view(dtype);
  }
};

at::Tensor rows_of(const at::Tensor& indices, const at::Tensor& values, at::IntArrayRef sizes,
                   bool coalesced) {
  return at::_sparse_coo_tensor_unsafe(indices, values, sizes, values.options().layout(at::kSparse),
                                       coalesced);
}

}  // namespace

AllReduceRows::AllReduceRows(std::shared_ptr<Communicator> communicator,
                             std::shared_ptr<Scratch> scratch,
                             std::shared_ptr<SparseGradient> gradient, std::vector<int64_t> sizes,
                             ReduceOp op)
    : communicator_(std::move(communicator)),
      scratch_(std::move(scratch)),
      gradient_(std::move(gradient)),
      sizes_(std::move(sizes)),
      op_(op) {
  BAGUA_CHECK_ARG(op == ReduceOp::kSum || op == ReduceOp::kAvg,
                  "AllReduceRows takes ReduceOp.SUM or ReduceOp.AVG.");
  BAGUA_CHECK_ARG(!sizes_.empty(), "AllReduceRows: a parameter has at least one dimension.");
  for (size_t i = 1; i < sizes_.size(); ++i) row_numel_ *= sizes_[i];
}

void AllReduceRows::run(at::Tensor& flat, const Round& round) {
  // 1.
  at::Tensor rows = own_rows(flat, round);
  if (communicator_->group().size > 1) {
    // 2.
    const std::vector<int64_t> numbers = gather_numbers(rows, round);
    // 3., 4.
    rows = exchange(rows, numbers, round);
  }
  if (flat.is_cpu()) {
    flat.fill_(all_finite(rows._values()) ? 0.0 : std::numeric_limits<double>::quiet_NaN());
  }
  gradient_->result = std::move(rows);
}

at::Tensor AllReduceRows::own_rows(const at::Tensor& like, const Round& round) {
  const at::Tensor local = std::exchange(gradient_->local, {});
  if (!local.defined()) {
    std::vector<int64_t> no_rows = sizes_;
    no_rows[0] = 0;
    return rows_of(at::empty({1, 0}, like.options().dtype(at::kLong)),
                   at::empty(no_rows, like.options()), sizes_, true);
  }
  check_rows(local, sizes_, like, round.bucket);
  const at::Tensor own = local.detach();
  const int ranks = communicator_->group().size;
  if (op_ != ReduceOp::kAvg || ranks == 1) return own.coalesce();
  return rows_of(own._indices(), own._values().div(ranks), sizes_, own.is_coalesced()).coalesce();
}

std::vector<int64_t> AllReduceRows::gather_numbers(const at::Tensor& own, const Round& round) {
  const int64_t ranks = communicator_->group().size;
  const auto options = own._indices().options();
  at::Tensor everyone = at::empty({ranks}, options);
  communicator_->all_gather(at::full({1}, own._nnz(), options), everyone);
  everyone = everyone.cpu();
  const auto* first = everyone.const_data_ptr<int64_t>();
  std::vector<int64_t> numbers(first, first + ranks);
  for (int64_t rank = 0; rank < ranks; ++rank) {
    const bool own_changed = rank == communicator_->group().rank && numbers[rank] != own._nnz();
    if (numbers[rank] >= 0 && numbers[rank] <= sizes_[0] && !own_changed) continue;
    throw MismatchError(concat("bucket '", round.bucket, "': rank ", rank, " announces ",
                               numbers[rank], " rows of a gradient that has ", sizes_[0], "."));
  }
  return numbers;
}

at::Tensor AllReduceRows::exchange(const at::Tensor& own, const std::vector<int64_t>& numbers,
                                   const Round& round) {
  const auto ranks = static_cast<int64_t>(numbers.size());
  const int64_t most = *std::max_element(numbers.begin(), numbers.end());
  if (most == 0) return own;
  // 3.
  const at::Tensor own_values = own._values();
  const at::ScalarType dtype = own_values.scalar_type();
  const int64_t row_bytes = row_numel_ * static_cast<int64_t>(own_values.element_size());
  const int64_t size = Message::size(most, row_bytes);
  const Message sent{scratch_->get(Scratch::kSend, size, at::kByte, own.device()), most, row_bytes};
  sent.bytes.zero_();
  sent.indices(own._nnz()).copy_(own._indices().view({-1}));
  sent.values(own._nnz(), dtype).copy_(own_values.reshape({-1}));
  at::Tensor received = scratch_->get(Scratch::kReceive, ranks * size, at::kByte, own.device());
  communicator_->all_gather(sent.bytes, received);
  // 4.
  std::vector<int64_t> value_sizes = sizes_;
  std::vector<at::Tensor> indices, values, valid;
  std::vector<int64_t> sources;
  for (int64_t rank = 0; rank < ranks; ++rank) {
    if (numbers[rank] == 0) continue;
    const Message message{received.narrow(0, rank * size, size), most, row_bytes};
    value_sizes[0] = numbers[rank];
    indices.push_back(message.indices(numbers[rank]));
    values.push_back(message.values(numbers[rank], dtype).view(value_sizes));
    valid.push_back(are_valid(indices.back()));
    sources.push_back(rank);
  }
  check_indices(at::stack(valid), sources, round);
  return rows_of(at::cat(indices).view({1, -1}), at::cat(values), sizes_, false).coalesce();
}

// A coalesced tensor's: ascending, each once.
at::Tensor AllReduceRows::are_valid(const at::Tensor& indices) const {
  const int64_t last = indices.numel() - 1;
  const at::Tensor ascending = indices.narrow(0, 1, last).gt(indices.narrow(0, 0, last)).all();
  const at::Tensor inside = indices[0].ge(0).logical_and(indices[last].lt(sizes_[0]));
  return ascending.logical_and(inside);
}

// One copy to the host, whatever the number of ranks.
void AllReduceRows::check_indices(const at::Tensor& valid, const std::vector<int64_t>& sources,
                                  const Round& round) const {
  const at::Tensor on_host = valid.cpu();
  const bool* const first = on_host.const_data_ptr<bool>();
  const auto wrong = std::find(first, first + sources.size(), false) - first;
  if (wrong == std::ssize(sources)) return;
  throw MismatchError(concat("bucket '", round.bucket, "': the payload from rank ", sources[wrong],
                             " was corrupted on the wire: its indices are not ",
                             "ascending ones below ", sizes_[0], "."));
}

std::string AllReduceRows::describe() const {
  return concat("AllReduceRows(", op_ == ReduceOp::kAvg ? "mean" : "sum", ", ", sizes_[0],
                " rows of ", row_numel_, ", ranks ", communicator_->group().size, ")");
}

}  // namespace bagua
