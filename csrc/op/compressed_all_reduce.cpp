#include "op/compressed_all_reduce.h"

#include <algorithm>
#include <utility>
#include <vector>

#include <ATen/ops/add.h>

#include "base/check.h"
#include "ledger/communications.h"
#include "op/tensors/all_finite.h"
#include "op/wire/bucket_parts.h"

namespace bagua {
namespace {

// total, which is tiles [first_tile, end_tile) of `sum`, becomes the sum of all versions of this
// rank's part, in rank order.
void add_versions(const BucketParts& parts, const at::Tensor& sum, at::Tensor& total,
                  int64_t first_tile, int64_t end_tile) {
  total.zero_();
  for (int peer = 0; peer < parts.group.size; ++peer) {
    const PayloadRows& rows = peer == parts.group.rank ? parts.send : parts.receive;
    parts.calls.decode_add(own_chunks(parts, sum, rows, peer, first_tile, end_tile));
  }
}

// All versions of this rank's part, of which the own one becomes the result.
PayloadVersions versions_of(const BucketParts& parts) {
  return {.results = parts.send.row(parts.group.rank),
          .first = parts.receive.row(0),
          .stride = parts.receive.stride,
          .rows = parts.group.size,
          .own = parts.group.rank};
}

}  // namespace

CompressedAllReduce::CompressedAllReduce(std::shared_ptr<Communicator> communicator,
                                         std::shared_ptr<const Codec> codec,
                                         std::shared_ptr<Scratch> scratch, ReduceOp op,
                                         Checksum checksum, std::optional<TwoResiduals> residuals)
    : exchange_(std::move(communicator), checksum),
      codec_(std::move(codec)),
      scratch_(std::move(scratch)),
      op_(op) {
  BAGUA_CHECK_ARG(op == ReduceOp::kSum || op == ReduceOp::kAvg,
                  "CompressedAllReduce takes ReduceOp.SUM or ReduceOp.AVG.");
  if (!residuals) return;
  constexpr size_t kWorker = 0, kCommunications = 1, kServer = 2;
  const std::shared_ptr<RoundMemory>& memory = residuals->memory;
  const auto is_residual = [&](size_t i) {
    const at::ScalarType type = memory->value(i).scalar_type();
    return type == memory->value(kWorker).scalar_type() &&
           (type == at::kFloat || type == at::kDouble);
  };
  BAGUA_CHECK_ARG(memory && memory->size() == 3 && is_residual(kWorker) && is_residual(kServer),
                  "CompressedAllReduce remembers three tensors: a residual of float32 or float64, "
                  "the number of communications, and the residual of this rank's part, of the same "
                  "dtype.");
  check_communications(memory->value(kCommunications), "CompressedAllReduce");
  residuals_.emplace(BothSides{.worker = Feedback(memory, kWorker),
                               .server = Feedback(memory, kServer),
                               .padding = residuals->padding,
                               .shards = std::move(residuals->shards)});
}

void CompressedAllReduce::run(at::Tensor& flat, const Round& round) {
  if (residuals_) return run_with_residuals(flat, round);
  const Group group = exchange_.group();
  if (group.size == 1 || flat.numel() == 0) return;
  const at::Tensor values = codec_values(flat, *scratch_);
  const BucketParts parts = cut(values, group, *codec_, *scratch_);
  // Undefined where kernels sum and encode.
  at::Tensor sum;
  if (codec_->fused() == nullptr) {
    sum = scratch_->get(Scratch::kSum, parts.stride, at::kFloat, flat.device());
  }
  exchange_.begin(round, codec_->frames());
  announce_gather(exchange_, parts, round);
  // 1. and 2.
  scatter(exchange_, parts, round, [&](int64_t first, int64_t end) {
    reduce(parts, sum, first, end);  // 3. and 4.
  });
  // 5.
  gather(exchange_, parts, round);
  if (!values.is_same(flat)) flat.copy_(values);
}

void CompressedAllReduce::run_with_residuals(at::Tensor& flat, const Round& round) {
  const Group group = exchange_.group();
  check_fits(flat, round);
  const float scale = round.grad_scale;
  if (group.size == 1 || flat.numel() == 0) {
    const at::Tensor& worker = residuals_->worker.residual();
    add_residual(flat, at::add(worker, residuals_->server.residual()), scale);
    residuals_->worker.kept().zero_();
    residuals_->server.kept().zero_();
    return leave(flat, round);
  }
  // 1.
  at::Tensor p = residuals_->worker.corrected(flat, scale);
  const bool in_f64 = p.scalar_type() == at::kDouble;
  const BucketParts parts = cut(codec_values(p, *scratch_), group, *codec_, *scratch_);
  if (in_f64) {
    round_trip(parts);
    p.sub_(parts.flat);
  }
  BucketParts results = parts;
  const bool in_place = flat.scalar_type() == at::kFloat;
  results.flat =
      in_place ? flat : scratch_->get(Scratch::kScaled, flat.numel(), at::kFloat, flat.device());
  exchange_.begin(round, codec_->frames());
  announce_gather(exchange_, parts, round);
  // 2. to 4.
  scatter(exchange_, parts, round,
          in_f64 ? reduce_in_f64(parts, results.flat) : reduce_with_residuals(parts, results.flat),
          in_f64 ? Encoded::kBefore : Encoded::kResidual);
  // 5.
  gather(exchange_, results, round);
  const float factor = op_ == ReduceOp::kAvg ? scale : scale * static_cast<float>(group.size);
  at::Tensor& scaled = in_f64 ? flat : results.flat;
  if (in_f64) flat.copy_(results.flat);
  if (factor != 1.0f) scaled.mul_(factor);
  if (!in_place && !in_f64) flat.copy_(results.flat);
  at::Tensor& q = residuals_->server.kept();
  const int64_t end = flat.numel() - residuals_->padding;
  p.narrow(0, end, residuals_->padding).zero_();
  const int64_t in_part = std::clamp<int64_t>(end - parts.first(group.rank), 0, q.numel());
  q.narrow(0, in_part, q.numel() - in_part).zero_();
  leave(flat, round);
}

OnTiles CompressedAllReduce::reduce_with_residuals(const BucketParts& parts,
                                                   const at::Tensor& results) {
  const int rank = parts.group.rank;
  const at::Tensor own = results.narrow(0, parts.first(rank), parts.numel(rank));
  const at::Tensor q = residuals_->server.kept(), before = residuals_->server.residual();
  if (const FusedCodec* fused = parts.calls.fused()) {
    const ResidualArrays arrays{.x = q.const_data_ptr<float>(),
                                .before = before.const_data_ptr<float>(),
                                .result = own.mutable_data_ptr<float>()};
    return [=, &parts](int64_t first_tile, int64_t end_tile) {
      const std::vector<Chunk> chunks =
          own_chunks(parts, q, parts.send, rank, first_tile, end_tile);
      fused->encode_sum_residual(chunks, versions_of(parts), static_cast<float>(parts.group.size),
                                 arrays, parts.calls.fused_scratch(chunks, DType::kFloat32),
                                 parts.calls.stream());
    };
  }
  const at::Tensor sum = scratch_->get(Scratch::kSum, parts.stride, at::kFloat, results.device());
  return [=, &parts](int64_t first_tile, int64_t end_tile) {
    const PartLayout layout = parts.layout(rank);
    const int64_t first = layout.first_element(first_tile);
    const int64_t numel = layout.numel(first_tile, end_tile);
    at::Tensor total = sum.narrow(0, first, numel);
    add_versions(parts, sum, total, first_tile, end_tile);
    at::Tensor corrected = q.narrow(0, first, numel);
    at::add_out(corrected, total.div_(parts.group.size), before.narrow(0, first, numel));
    parts.calls.encode_residual(own_chunks(parts, q, parts.send, rank, first_tile, end_tile));
    parts.calls.decode(own_chunks(parts, own, parts.send, rank, first_tile, end_tile));
  };
}

OnTiles CompressedAllReduce::reduce_in_f64(const BucketParts& parts, const at::Tensor& results) {
  const int rank = parts.group.rank;
  const at::Tensor own = results.narrow(0, parts.first(rank), parts.numel(rank));
  const at::Tensor q = residuals_->server.kept(), before = residuals_->server.residual();
  return [=, &parts](int64_t first_tile, int64_t end_tile) {
    const PartLayout layout = parts.layout(rank);
    const int64_t first = layout.first_element(first_tile);
    const int64_t numel = layout.numel(first_tile, end_tile);
    at::Tensor corrected = q.narrow(0, first, numel).zero_();
    at::Tensor decoded = own.narrow(0, first, numel);
    for (int peer = 0; peer < parts.group.size; ++peer) {
      const PayloadRows& rows = peer == rank ? parts.send : parts.receive;
      parts.calls.decode(own_chunks(parts, own, rows, peer, first_tile, end_tile));
      corrected.add_(decoded);
    }
    corrected.div_(parts.group.size).add_(before.narrow(0, first, numel));
    decoded.copy_(corrected);
    const std::vector<Chunk> chunks =
        own_chunks(parts, own, parts.send, rank, first_tile, end_tile);
    parts.calls.encode(chunks);
    parts.calls.decode(chunks);
    corrected.sub_(decoded);
  };
}

void CompressedAllReduce::check_fits(const at::Tensor& flat, const Round& round) {
  const Group group = exchange_.group();
  const int64_t stride = part_stride(flat.numel(), group.size);
  const int64_t first = std::min(flat.numel(), group.rank * stride);
  const int64_t part = std::min(stride, flat.numel() - first);
  const at::Tensor& worker = residuals_->worker.residual();
  const at::Tensor& server = residuals_->server.residual();
  BAGUA_CHECK_ARG(worker.numel() == flat.numel() && worker.device() == flat.device() &&
                      server.numel() == part && server.device() == flat.device() &&
                      at::isFloatingType(flat.scalar_type()) &&
                      (worker.scalar_type() == at::kFloat || flat.scalar_type() == at::kDouble) &&
                      residuals_->padding <= flat.numel(),
                  "bucket '", round.bucket, "' (", flat.numel(), " elements of ", flat.toString(),
                  ", of which rank ", group.rank, " of ", group.size, " sums ", part,
                  ") does not fit the residuals that are remembered for it (", worker.numel(),
                  " and ", server.numel(), " elements).");
}

void CompressedAllReduce::leave(const at::Tensor& flat, const Round& round) {
  const std::shared_ptr<Communicator>& shards = residuals_->shards;
  const Finite finite = finite_of(shards ? finite_everywhere(flat, *shards) : flat);
  residuals_->worker.leave(round.number, finite);  // both: they are of one memory
}

// Steps 3 and 4: on CPU while a tile is in cache, on a device in few launches if the codec can.
void CompressedAllReduce::reduce(const BucketParts& parts, const at::Tensor& sum,
                                 int64_t first_tile, int64_t end_tile) const {
  const int rank = parts.group.rank;
  const std::vector<Chunk> own =
      own_chunks(parts, parts.part(rank), parts.send, rank, first_tile, end_tile);
  const int divisor = op_ == ReduceOp::kAvg ? parts.group.size : 1;
  if (const FusedCodec* fused = parts.calls.fused()) {
    return fused->encode_sum(own, versions_of(parts), static_cast<float>(divisor), parts.dtype,
                             parts.calls.fused_scratch(own, parts.dtype), parts.calls.stream());
  }
  const PartLayout layout = parts.layout(rank);
  const int64_t first = layout.first_element(first_tile);
  const int64_t numel = layout.numel(first_tile, end_tile);
  at::Tensor total = sum.narrow(0, first, numel);
  // 3.
  parts.calls.encode(own);
  add_versions(parts, sum, total, first_tile, end_tile);
  if (divisor != 1) total.div_(divisor);
  parts.part(rank).narrow(0, first, numel).copy_(total);
  // 4.
  parts.calls.encode(own);
  parts.calls.decode(own);
}

std::string CompressedAllReduce::describe() const {
  return concat("CompressedAllReduce(", codec_->name(), ", ",
                op_ == ReduceOp::kAvg ? "mean" : "sum", ", ranks ", exchange_.group().size,
                residuals_ ? ", error feedback" : "", checksum_text(exchange_.checksum()), ")");
}

}  // namespace bagua
