#include "op/low_rank.h"

#include <algorithm>
#include <limits>
#include <utility>

#include <ATen/CPUGeneratorImpl.h>
#include <ATen/Dispatch.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/from_blob.h>
#include <ATen/ops/where.h>
#include <c10/core/DeviceGuard.h>

#include "base/check.h"
#include "base/mixed_bits.h"
#include "comm/device_stream.h"
#include "comm/host_memory.h"
#include "ledger/communications.h"
#include "op/tensors/all_finite.h"
#include "op/tensors/arithmetic_dtype.h"
#include "op/tensors/low_rank_products.h"

namespace bagua {
namespace {

double largest(at::ScalarType dtype) {
  return AT_DISPATCH_FLOATING_TYPES_AND2(at::kHalf, at::kBFloat16, dtype, "largest", [] {
    return static_cast<double>(std::numeric_limits<scalar_t>::max());
  });
}

double largest_magnitude(const at::Tensor& tensor) {
  return tensor.numel() == 0 ? 0.0 : tensor.abs().max().item<double>();
}

uint64_t mix(uint64_t hash, uint64_t value) {
  return mixed_bits(hash + value + 0x9e3779b97f4a7c15);
}

}  // namespace

// One run: the memory it uses.
struct LowRank::Job {
  at::Tensor flat;     // the bucket
  at::Tensor error;    // as long; undefined: none
  at::Tensor work;     // as long, of the dtype that is computed in: all M
  at::Tensor queries;  // all Q of this round
  at::Tensor left;     // message: all P, then the non-matrix elements
  at::Tensor right;    // message: all Q'
  double scale;

  at::Tensor in(const at::Tensor& memory, const LowRankItem& m) const {
    return memory.narrow(0, m.offset, m.rows * m.columns).view({m.rows, m.columns});
  }
  at::Tensor p(const LowRankItem& m) const {
    return left.narrow(0, m.left, m.rows * m.rank).view({m.rank, m.rows});
  }
  at::Tensor q(const at::Tensor& memory, const LowRankItem& m) const {
    return memory.narrow(0, m.right, m.columns * m.rank).view({m.rank, m.columns});
  }
};

LowRank::LowRank(std::shared_ptr<Communicator> communicator, std::shared_ptr<Scratch> scratch,
                 int64_t numel, const std::vector<LowRankMatrix>& matrices, LowRankOptions options,
                 std::shared_ptr<RoundMemory> memory)
    : communicator_(std::move(communicator)),
      scratch_(std::move(scratch)),
      options_(options),
      memory_(std::move(memory)),
      layout_(numel, matrices) {
  BAGUA_CHECK_ARG(memory_ && memory_->size() == 3,
                  "LowRank remembers three tensors: errors, queries, communications.");
  const at::Tensor& error = memory_->value(kError);
  const at::Tensor& queries = memory_->value(kQueries);
  const at::Tensor& communications = memory_->value(kCommunications);
  const int64_t errors = options_.error_feedback ? layout_.numel : 0;
  BAGUA_CHECK_ARG(error.dim() == 1 && error.numel() == errors, "LowRank: the error must have ",
                  errors, " elements, not ", error.numel(), ".");
  BAGUA_CHECK_ARG(queries.dim() == 1 && queries.numel() == layout_.right_numel &&
                      queries.scalar_type() == error.scalar_type() &&
                      (queries.scalar_type() == at::kFloat || queries.scalar_type() == at::kDouble),
                  "LowRank: the queries must have ", layout_.right_numel,
                  " elements, float32 or float64 like the error, not ", queries.numel(), ".");
  check_communications(communications, "LowRank");
  const at::Device device = queries.device();
  if (!device.is_cuda() || layout_.numel == 0) return;
  const c10::DeviceGuard on_device(device);
  kernels_ = options_.kernels ? options_.kernels : make_cuda_low_rank_kernels();
  if (!kernels_) return;
  table_.emplace(layout_.matrices, layout_.rest);
  const std::vector<std::byte>& bytes = table_->bytes();
  table_on_device_ = at::from_blob(const_cast<std::byte*>(bytes.data()),
                                   {static_cast<int64_t>(bytes.size())}, at::kByte)
                         .to(device);
}

void LowRank::check(const at::Tensor& flat, const Round& round) {
  const at::Tensor& queries = memory_->value(kQueries);
  BAGUA_CHECK_ARG(flat.numel() == layout_.numel && at::isFloatingType(flat.scalar_type()) &&
                      arithmetic_dtype(flat.scalar_type()) == queries.scalar_type() &&
                      flat.device() == queries.device(),
                  "bucket '", round.bucket, "' (", flat.toString(), ", ", flat.numel(),
                  " elements) does not fit the memory of LowRank (", queries.toString(), ", ",
                  layout_.numel, ").");
}

void LowRank::run(at::Tensor& flat, const Round& round) {
  check(flat, round);
  if (communicator_->group().size == 1) return run_alone(flat, round);
  const at::ScalarType dtype = arithmetic_dtype(flat.scalar_type());
  const auto scratch = [&](Scratch::Use use, int64_t numel) {
    return scratch_->get(use, numel, dtype, flat.device());
  };
  const bool in_place = !options_.error_feedback && flat.scalar_type() == dtype;
  const Job job{.flat = flat,
                .error = options_.error_feedback ? memory_->value(kError) : at::Tensor(),
                .work = options_.error_feedback ? memory_->next(kError)
                        : in_place              ? flat
                                                : scratch(Scratch::kSum, layout_.numel),
                .queries = queries(flat, round),
                .left = scratch(Scratch::kSend, layout_.left_numel + layout_.rest_numel),
                .right = scratch(Scratch::kReceive, layout_.right_numel),
                .scale = round.grad_scale};
  if (kernels_) return run_with_kernels(job, round);
  // On a device it is not known yet what is finite: NaN and infinity pass through to the result.
  Finite finite = reduce_left(job);
  std::vector<at::Tensor> vanished;
  if (finite.here) {
    vanished = orthonormalise_left(job);
    finite &= reduce_right(job);
  }
  if (finite.here) {
    write_result(job);
    keep_queries(job, vanished);
    finite &= finite_result(job);
  } else {
    flat.fill_(std::numeric_limits<double>::quiet_NaN());
  }
  memory_->leave(round.number, finite);
}

// All steps, each for all matrices at once.
void LowRank::run_with_kernels(const Job& job, const Round& round) {
  const auto scratch = [&](Scratch::Use use, int64_t numel, at::ScalarType dtype) {
    return scratch_->get(use, numel, dtype, job.flat.device());
  };
  const LowRankTable& table = *table_;
  const LowRankPlan plan =
      table.at(static_cast<const std::byte*>(table_on_device_.const_data_ptr()));
  void* const stream = current_stream_handle(job.flat.device());
  at::Tensor left = job.left, right = job.right;
  const at::Tensor finite = at::empty({}, job.flat.options().dtype(at::kBool));
  const at::Tensor vectors = scratch(Scratch::kCast, table.matrix_elements(), at::kDouble);
  const at::Tensor partials = scratch(Scratch::kValues, table.partials(), left.scalar_type());
  const at::Tensor vanished = scratch(Scratch::kIndices, table.vectors(), at::kBool);
  const LowRankMemory memory{.dtype = low_rank_dtype(job.flat.scalar_type()),
                             .flat = job.flat.data_ptr(),
                             .error = job.error.defined() ? job.error.data_ptr() : nullptr,
                             .work = job.work.data_ptr(),
                             .queries = job.queries.data_ptr(),
                             .left = left.data_ptr(),
                             .right = right.data_ptr(),
                             .next_queries = memory_->next(kQueries).data_ptr(),
                             .vectors = vectors.data_ptr<double>(),
                             .partials = partials.data_ptr(),
                             .vanished = vanished.data_ptr<bool>(),
                             .finite = finite.data_ptr<bool>(),
                             .scale = job.scale,
                             .ranks = communicator_->group().size};
  // 1. and 2.
  kernels_->project_rows(plan, memory, stream);
  communicator_->all_reduce(left, ReduceOp::kSum);
  // 3.
  kernels_->orthonormalise(plan, memory, stream);
  kernels_->project_columns(plan, memory, stream);
  // 4.
  if (layout_.right_numel > 0) communicator_->all_reduce(right, ReduceOp::kSum);
  // 5.
  kernels_->keep_queries(plan, memory, stream);
  kernels_->reconstruct(plan, memory, stream);
  count_communication();
  memory_->leave(round.number, {.here = true, .there = finite});
}

void LowRank::count_communication() {
  memory_->next(kCommunications).copy_(memory_->value(kCommunications)).add_(1);
}

// A single rank sends nothing, but may have a residual from a larger world.
void LowRank::run_alone(at::Tensor& flat, const Round& round) {
  if (options_.error_feedback) {
    flat.add_(memory_->value(kError), round.grad_scale);
    memory_->next(kError).zero_();
  }
  for (const Memory kept : {kQueries, kCommunications}) {
    memory_->next(kept).copy_(memory_->value(kept));
  }
  memory_->leave(round.number, finite_of(flat));
}

// Queries of the round before, or fresh ones: N(0, 1), the same on all ranks.
at::Tensor LowRank::queries(const at::Tensor& flat, const Round& round) {
  const at::Tensor& known = memory_->value(kQueries);
  const int64_t communications = memory_->value(kCommunications).item<int64_t>();
  if (options_.warm_start && communications > 0) return known;
  uint64_t seed = mix(options_.seed, communications);
  for (const char letter : round.bucket) seed = mix(seed, static_cast<unsigned char>(letter));
  at::Generator generator = at::detail::createCPUGenerator(seed);
  at::Tensor drawn =
      scratch_->get(Scratch::kScaled, layout_.right_numel, known.scalar_type(), flat.device());
  at::Tensor numbers = host_memory({layout_.right_numel}, known.scalar_type(), flat.device());
  drawn.copy_(numbers.normal_(0, 1, generator), /*non_blocking=*/true);
  return drawn;
}

// Steps 1, matrix by matrix while it is in cache, and 2. Whether what arrived is finite.
Finite LowRank::reduce_left(const Job& job) {
  for (const LowRankItem& m : layout_.matrices) {
    project_rows(job.in(job.flat, m), job.scale,
                 job.error.defined() ? job.in(job.error, m) : job.error, job.in(job.work, m),
                 job.q(job.queries, m), job.p(m));
  }
  for (const LowRankItem& range : layout_.rest) {
    at::Tensor part = job.left.narrow(0, range.left, range.columns);
    part.copy_(job.flat.narrow(0, range.offset, range.columns));
    if (job.scale != 1.0) part.mul_(1.0 / job.scale);
  }
  at::Tensor left = job.left;
  communicator_->all_reduce(left, ReduceOp::kSum);
  return finite_of(left);
}

// Step 3, for P.
std::vector<at::Tensor> LowRank::orthonormalise_left(const Job& job) const {
  std::vector<at::Tensor> vanished;
  for (const LowRankLayout::Batch& batch : layout_.batches) {
    const int64_t count = batch.members.size();
    at::Tensor vectors = job.left.narrow(0, batch.left, count * batch.rows * batch.rank)
                             .view({count, batch.rank, batch.rows});
    vanished.push_back(orthonormalise(vectors));
  }
  return vanished;
}

// Steps 3, for Q', and 4.
Finite LowRank::reduce_right(const Job& job) {
  for (const LowRankItem& m : layout_.matrices) {
    project_columns(job.in(job.work, m), job.p(m), job.q(job.right, m));
  }
  at::Tensor right = job.right;
  if (layout_.right_numel > 0) communicator_->all_reduce(right, ReduceOp::kSum);
  right.div_(communicator_->group().size);
  return finite_of(right);
}

// Step 5, but for Q.
void LowRank::write_result(const Job& job) const {
  for (const LowRankItem& m : layout_.matrices) {
    reconstruct(job.p(m), job.q(job.right, m), job.scale, job.in(job.flat, m),
                options_.error_feedback ? job.in(job.work, m) : at::Tensor());
  }
  for (const LowRankItem& range : layout_.rest) {
    at::Tensor mean = job.left.narrow(0, range.left, range.columns);
    mean.div_(communicator_->group().size);
    if (job.scale != 1.0) mean.mul_(job.scale);
    job.flat.narrow(0, range.offset, range.columns).copy_(mean);
    if (options_.error_feedback) job.work.narrow(0, range.offset, range.columns).zero_();
  }
}

// Columns of P have length 1, so no element of P Q'^T is larger than the sum of a row of |Q'|.
Finite LowRank::finite_result(const Job& job) const {
  if (!job.flat.is_cpu()) return finite_of(job.flat);
  int64_t rank = 1;
  for (const LowRankLayout::Batch& batch : layout_.batches) rank = std::max(rank, batch.rank);
  const double bound =
      std::max(job.scale * static_cast<double>(rank) * largest_magnitude(job.right),
               largest_magnitude(job.left.narrow(0, layout_.left_numel, layout_.rest_numel)));
  if (bound < largest(job.flat.scalar_type()) / 2) return {};
  return finite_of(job.flat);
}

// Step 5, for Q.
void LowRank::keep_queries(const Job& job, const std::vector<at::Tensor>& vanished) {
  at::Tensor& next = memory_->next(kQueries);
  count_communication();
  for (size_t i = 0; i < layout_.batches.size(); ++i) {
    for (size_t k = 0; k < layout_.batches[i].members.size(); ++k) {
      const LowRankItem& m = layout_.matrices[layout_.batches[i].members[k]];
      at::Tensor kept = job.q(next, m);
      at::where_out(kept, vanished[i][static_cast<int64_t>(k)], job.q(job.queries, m),
                    job.q(job.right, m));
    }
  }
}

std::string LowRank::describe() const {
  return concat("LowRank(", layout_.matrices.size(), " matrices, ",
                layout_.left_numel + layout_.rest_numel, " + ", layout_.right_numel,
                " elements sent)");
}

}  // namespace bagua
