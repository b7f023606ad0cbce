#include "op/low_rank.h"

#include <algorithm>
#include <limits>
#include <map>
#include <utility>

#include <ATen/CPUGeneratorImpl.h>
#include <ATen/Dispatch.h>
#include <ATen/ops/add.h>
#include <ATen/ops/isfinite.h>
#include <ATen/ops/mm.h>
#include <ATen/ops/mul.h>
#include <ATen/ops/randn.h>
#include <ATen/ops/scalar_tensor.h>
#include <ATen/ops/where.h>

#include "base/check.h"
#include "op/orthogonalise.h"

namespace bagua {
namespace {

at::ScalarType arithmetic_dtype(at::ScalarType bucket) {
  return bucket == at::kDouble ? at::kDouble : at::kFloat;
}

double largest(at::ScalarType dtype) {
  return AT_DISPATCH_FLOATING_TYPES_AND2(at::kHalf, at::kBFloat16, dtype, "largest", [] {
    return static_cast<double>(std::numeric_limits<scalar_t>::max());
  });
}

bool all_finite(const at::Tensor& tensor) { return at::isfinite(tensor).all().item<bool>(); }

double largest_magnitude(const at::Tensor& tensor) {
  return tensor.numel() == 0 ? 0.0 : tensor.abs().max().item<double>();
}

uint64_t mix(uint64_t hash, uint64_t value) {  // splitmix64
  hash += value + 0x9e3779b97f4a7c15;
  hash = (hash ^ (hash >> 30)) * 0xbf58476d1ce4e5b9;
  hash = (hash ^ (hash >> 27)) * 0x94d049bb133111eb;
  return hash ^ (hash >> 31);
}

}  // namespace

// One run: the memory it uses.
struct LowRank::Job {
  at::Tensor& flat;
  const Round& round;
  double scale;
  at::Tensor work;     // all M, where their matrices are in the bucket
  at::Tensor queries;  // all Q of this round
  at::Tensor left;     // message: all P, then what is no matrix
  at::Tensor right;    // message: all Q'

  at::Tensor in(const at::Tensor& memory, const LowRankMatrix& m) const {
    return memory.narrow(0, m.offset, m.rows * m.columns).view({m.rows, m.columns});
  }
  at::Tensor p(const Placed& placed) const {
    const LowRankMatrix& m = placed.matrix;
    return left.narrow(0, placed.left, m.rows * m.rank).view({m.rows, m.rank});
  }
  at::Tensor q(const at::Tensor& memory, const Placed& placed) const {
    const LowRankMatrix& m = placed.matrix;
    return memory.narrow(0, placed.right, m.columns * m.rank).view({m.columns, m.rank});
  }
};

LowRank::LowRank(std::shared_ptr<Communicator> communicator, std::shared_ptr<Scratch> scratch,
                 int64_t numel, const std::vector<LowRankMatrix>& matrices, LowRankOptions options,
                 std::shared_ptr<RoundMemory> memory)
    : communicator_(std::move(communicator)),
      scratch_(std::move(scratch)),
      options_(options),
      memory_(std::move(memory)),
      numel_(numel) {
  place(matrices);
  BAGUA_CHECK_ARG(memory_ && memory_->size() == 3,
                  "LowRank remembers three tensors: errors, queries, communications.");
  const at::Tensor& error = memory_->value(kError);
  const at::Tensor& queries = memory_->value(kQueries);
  const at::Tensor& communications = memory_->value(kCommunications);
  const int64_t errors = options_.error_feedback ? numel_ : 0;
  BAGUA_CHECK_ARG(error.dim() == 1 && error.numel() == errors, "LowRank: the error must have ",
                  errors, " elements, not ", error.numel(), ".");
  BAGUA_CHECK_ARG(queries.dim() == 1 && queries.numel() == right_numel_ &&
                      queries.scalar_type() == error.scalar_type() &&
                      (queries.scalar_type() == at::kFloat || queries.scalar_type() == at::kDouble),
                  "LowRank: the queries must have ", right_numel_,
                  " elements, float32 or float64 like the error, not ", queries.numel(), ".");
  BAGUA_CHECK_ARG(communications.numel() == 1 && communications.scalar_type() == at::kLong &&
                      communications.is_cpu(),
                  "LowRank: communications must be one int64 in CPU memory.");
}

void LowRank::place(const std::vector<LowRankMatrix>& matrices) {
  std::map<std::pair<int64_t, int64_t>, std::vector<size_t>> by_shape;
  int64_t end = 0;
  const auto add_rest = [&](int64_t until) {
    if (until > end) rest_.push_back({end, until - end});
    rest_numel_ += std::max<int64_t>(until - end, 0);
  };
  for (const LowRankMatrix& m : matrices) {
    BAGUA_CHECK_ARG(
        m.offset >= end && m.rows > 0 && m.columns > 0 && m.offset + m.rows * m.columns <= numel_,
        "LowRank: a matrix of ", m.rows, " x ", m.columns, " at ", m.offset,
        " overlaps the one before or the end of the bucket at ", numel_, ".");
    BAGUA_CHECK_ARG(m.rank >= 1 && m.rank <= std::min(m.rows, m.columns), "LowRank: rank ", m.rank,
                    " of a matrix of ", m.rows, " x ", m.columns,
                    " must be between 1 and the smaller of both.");
    add_rest(m.offset);
    end = m.offset + m.rows * m.columns;
    by_shape[{m.rows, m.rank}].push_back(placed_.size());
    placed_.push_back({m, 0, right_numel_});
    right_numel_ += m.columns * m.rank;
  }
  add_rest(numel_);
  for (auto& [shape, members] : by_shape) {
    const auto [rows, rank] = shape;
    const int64_t first = left_numel_;
    for (size_t i : members) {
      placed_[i].left = left_numel_;
      left_numel_ += rows * rank;
    }
    batches_.push_back({first, rows, rank, std::move(members)});
  }
}

void LowRank::check(const at::Tensor& flat, const Round& round) {
  const at::Tensor& queries = memory_->value(kQueries);
  BAGUA_CHECK_ARG(flat.numel() == numel_ && at::isFloatingType(flat.scalar_type()) &&
                      arithmetic_dtype(flat.scalar_type()) == queries.scalar_type() &&
                      flat.device() == queries.device(),
                  "bucket '", round.bucket, "' (", flat.toString(), ", ", flat.numel(),
                  " elements) does not fit the memory of LowRank (", queries.toString(), ", ",
                  numel_, ").");
}

void LowRank::run(at::Tensor& flat, const Round& round) {
  check(flat, round);
  if (communicator_->group().size == 1) return;
  const at::ScalarType dtype = arithmetic_dtype(flat.scalar_type());
  const auto scratch = [&](Scratch::Slot slot, int64_t numel) {
    return scratch_->get(slot, numel, dtype, flat.device());
  };
  const bool in_place = !options_.error_feedback && flat.scalar_type() == dtype;
  const Job job{.flat = flat,
                .round = round,
                .scale = round.grad_scale,
                .work = options_.error_feedback ? memory_->next(kError)
                        : in_place              ? flat
                                                : scratch(Scratch::kSum, numel_),
                .queries = queries(flat, round),
                .left = scratch(Scratch::kSend, left_numel_ + rest_numel_),
                .right = scratch(Scratch::kReceive, right_numel_)};
  bool finite = reduce_left(job);
  std::vector<at::Tensor> vanished;
  if (finite) {
    vanished = orthogonalise_left(job);
    finite = reduce_right(job);
  }
  if (finite) {
    write_result(job);
    keep_queries(job, vanished);
    finite = result_is_finite(job);
  } else {
    flat.fill_(std::numeric_limits<double>::quiet_NaN());
  }
  memory_->leave(round.step, finite);
}

// Those of the round before, or fresh ones: N(0, 1), the same on all ranks.
at::Tensor LowRank::queries(const at::Tensor& flat, const Round& round) {
  const at::Tensor& known = memory_->value(kQueries);
  const int64_t communications = memory_->value(kCommunications).item<int64_t>();
  if (options_.warm_start && communications > 0) return known;
  uint64_t seed = mix(options_.seed, communications);
  for (const char letter : round.bucket) seed = mix(seed, static_cast<unsigned char>(letter));
  at::Generator generator = at::detail::createCPUGenerator(seed);
  at::Tensor drawn =
      scratch_->get(Scratch::kScaled, right_numel_, known.scalar_type(), flat.device());
  drawn.copy_(at::randn({right_numel_}, generator, at::TensorOptions(known.scalar_type())));
  return drawn;
}

// Steps 1 and 2. False if what arrived is not finite.
bool LowRank::reduce_left(const Job& job) {
  const double unscale = 1.0 / job.scale;
  for (const Placed& placed : placed_) {
    const at::Tensor gradient = job.in(job.flat, placed.matrix);
    at::Tensor m = job.in(job.work, placed.matrix);
    if (options_.error_feedback) {
      at::add_out(m, job.in(memory_->value(kError), placed.matrix), gradient, unscale);
    } else if (!job.work.is_same(job.flat)) {
      at::mul_out(m, gradient, at::scalar_tensor(unscale, m.options()));
    }
    at::Tensor p = job.p(placed);
    at::mm_out(p, m, job.q(job.queries, placed));
  }
  int64_t at = left_numel_;
  for (const Range& range : rest_) {
    at::Tensor part = job.left.narrow(0, at, range.numel);
    part.copy_(job.flat.narrow(0, range.offset, range.numel));
    if (job.scale != 1.0) part.mul_(unscale);
    at += range.numel;
  }
  at::Tensor left = job.left;
  communicator_->all_reduce(left, ReduceOp::kSum);
  return all_finite(left);
}

// Step 3, for P.
std::vector<at::Tensor> LowRank::orthogonalise_left(const Job& job) const {
  std::vector<at::Tensor> vanished;
  for (const Batch& batch : batches_) {
    const int64_t count = batch.members.size();
    at::Tensor columns = job.left.narrow(0, batch.left, count * batch.rows * batch.rank)
                             .view({count, batch.rows, batch.rank});
    vanished.push_back(orthogonalise(columns));
  }
  return vanished;
}

// Steps 3, for Q', and 4.
bool LowRank::reduce_right(const Job& job) {
  for (const Placed& placed : placed_) {
    at::Tensor q = job.q(job.right, placed);
    at::mm_out(q, job.in(job.work, placed.matrix).t(), job.p(placed));
  }
  at::Tensor right = job.right;
  if (right_numel_ > 0) communicator_->all_reduce(right, ReduceOp::kSum);
  right.div_(communicator_->group().size);
  return all_finite(right);
}

// Step 5, but for Q.
void LowRank::write_result(const Job& job) const {
  for (const Placed& placed : placed_) {
    const LowRankMatrix& m = placed.matrix;
    at::Tensor result = job.in(job.flat, m);
    const at::Tensor p = job.p(placed), q = job.q(job.right, placed);
    if (result.scalar_type() == p.scalar_type()) {
      at::mm_out(result, p, q.t());
      if (job.scale != 1.0) result.mul_(job.scale);
    } else {
      at::Tensor wide =
          scratch_->get(Scratch::kCast, m.rows * m.columns, p.scalar_type(), p.device());
      wide = wide.view({m.rows, m.columns});
      at::mm_out(wide, p, q.t());
      result.copy_(wide.mul_(job.scale));
    }
    if (options_.error_feedback) job.in(job.work, m).sub_(result, 1.0 / job.scale);
  }
  int64_t at = left_numel_;
  for (const Range& range : rest_) {
    at::Tensor mean = job.left.narrow(0, at, range.numel);
    mean.div_(communicator_->group().size);
    if (job.scale != 1.0) mean.mul_(job.scale);
    job.flat.narrow(0, range.offset, range.numel).copy_(mean);
    if (options_.error_feedback) job.work.narrow(0, range.offset, range.numel).zero_();
    at += range.numel;
  }
}

// Columns of P have length 1, so no element of P Q'^T is larger than the sum of a row of |Q'|.
bool LowRank::result_is_finite(const Job& job) const {
  int64_t rank = 1;
  for (const Batch& batch : batches_) rank = std::max(rank, batch.rank);
  const double bound =
      std::max(job.scale * static_cast<double>(rank) * largest_magnitude(job.right),
               largest_magnitude(job.left.narrow(0, left_numel_, rest_numel_)));
  return bound < largest(job.flat.scalar_type()) / 2 || all_finite(job.flat);
}

// Step 5, for Q.
void LowRank::keep_queries(const Job& job, const std::vector<at::Tensor>& vanished) {
  at::Tensor& next = memory_->next(kQueries);
  for (size_t i = 0; i < batches_.size(); ++i) {
    for (size_t k = 0; k < batches_[i].members.size(); ++k) {
      const Placed& placed = placed_[batches_[i].members[k]];
      at::Tensor kept = job.q(next, placed);
      at::where_out(kept, vanished[i][static_cast<int64_t>(k)], job.q(job.queries, placed),
                    job.q(job.right, placed));
    }
  }
  at::Tensor& communications = memory_->next(kCommunications);
  communications.copy_(memory_->value(kCommunications)).add_(1);
}

std::string LowRank::describe() const {
  return concat("LowRank(", placed_.size(), " matrices, ", left_numel_ + rest_numel_, " + ",
                right_numel_, " elements sent)");
}

}  // namespace bagua
