#include "op/sharded/compressed_reduce_scatter.h"

#include <cmath>
#include <utility>
#include <vector>

#include "base/check.h"
#include "op/tensors/all_finite.h"

namespace bagua {
namespace {

// Step 3 for tiles [first_tile, end_tile) of this rank's part, on CPU while a tile is in cache.
// `sum`: memory for the part in f32.
void reduce(const BucketParts& parts, const at::Tensor& sum, const at::Tensor& result,
            double divisor, int64_t first_tile, int64_t end_tile) {
  const int rank = parts.group.rank;
  const PartLayout layout = parts.layout(rank);
  const int64_t first = layout.first_element(first_tile);
  const int64_t numel = layout.numel(first_tile, end_tile);
  at::Tensor total = sum.narrow(0, first, numel);
  total.zero_();
  for (int peer = 0; peer < parts.group.size; ++peer) {
    if (peer == rank) {
      total.add_(parts.part(rank).narrow(0, first, numel));
    } else {
      parts.calls.decode_add(own_chunks(parts, sum, parts.receive, peer, first_tile, end_tile));
    }
  }
  if (divisor != 1.0) total.div_(divisor);
  result.narrow(0, first, numel).copy_(total);
}

// Step 3 in one launch: this rank's part of the values becomes the result.
void reduce_in_place(const BucketParts& parts, double divisor, int64_t first_tile,
                     int64_t end_tile) {
  const int rank = parts.group.rank;
  const PayloadVersions versions{.results = parts.receive.row(rank),
                                 .first = parts.receive.row(0),
                                 .stride = parts.receive.stride,
                                 .rows = parts.group.size,
                                 .own = rank};
  parts.calls.fused()->sum(
      own_chunks(parts, parts.part(rank), parts.receive, rank, first_tile, end_tile), versions,
      {.divisor = static_cast<float>(divisor), .factor = 1.0f}, parts.dtype, parts.calls.stream());
}

}  // namespace

CompressedReduceScatter::CompressedReduceScatter(std::shared_ptr<Communicator> communicator,
                                                 std::shared_ptr<const Codec> codec,
                                                 std::shared_ptr<Scratch> scratch, double divisor,
                                                 std::shared_ptr<RoundMemory> memory,
                                                 Checksum checksum)
    : communicator_(std::move(communicator)),
      exchange_(communicator_, checksum),
      codec_(std::move(codec)),
      scratch_(std::move(scratch)),
      divisor_(divisor) {
  BAGUA_CHECK_ARG(std::isfinite(divisor) && divisor > 0,
                  "CompressedReduceScatter: the divisor must be a positive number, not ", divisor,
                  ".");
  if (!memory) return;
  const at::Tensor& error = memory->value(0);
  BAGUA_CHECK_ARG(error.scalar_type() == at::kFloat,
                  "CompressedReduceScatter: error feedback needs a float32 memory, not ",
                  error.toString(), "; codecs take no float64.");
  feedback_.emplace("CompressedReduceScatter", error.numel(), std::move(memory), scratch_);
}

void CompressedReduceScatter::run(at::Tensor& flat, const Round& round) {
  const Group group = exchange_.group();
  check_divides(flat, group, round);
  if (feedback_) feedback_->check(flat, round);
  exchange_.begin(round, codec_->frames());
  const at::Tensor values =
      feedback_ ? feedback_->corrected(flat, round) : codec_values(flat, *scratch_);
  const double divisor = feedback_ ? divisor_ / round.grad_scale : divisor_;
  const BucketParts parts = cut(values, group, *codec_, *scratch_);
  const at::Tensor result = flat.narrow(0, parts.first(group.rank), parts.stride);
  at::Tensor sum;
  if (parts.calls.fused() == nullptr) {
    sum = scratch_->get(Scratch::kSum, parts.stride, at::kFloat, flat.device());
  }
  const auto reduce_tiles = [&](int64_t first, int64_t end) {
    if (sum.defined()) return reduce(parts, sum, result, divisor, first, end);
    reduce_in_place(parts, divisor, first, end);
    if (!values.is_same(flat)) result.copy_(parts.part(group.rank));
  };
  // 1. to 3.
  scatter(exchange_, parts, round, reduce_tiles);
  if (group.size == 1) reduce_tiles(0, parts.layout(0).tiles());  // nothing arrives
  if (feedback_) remember(parts, result, round);
}

// The residual, where all of the bucket is m. My own part was added unchanged.
void CompressedReduceScatter::remember(const BucketParts& parts, const at::Tensor& result,
                                       const Round& round) {
  std::vector<Chunk> sent;
  for (const Payload& payload :
       parts.with_others([](int peer) { return peer; }, [](int peer) { return peer; })) {
    parts.append(sent, payload.peer, {payload, 0, payload.layout.tiles()}, parts.send);
  }
  parts.calls.for_all(sent, &CodecCalls::decode_add, -1.0f);
  parts.part(parts.group.rank).zero_();
  feedback_->leave(finite_everywhere(result, *communicator_), round);
}

std::string CompressedReduceScatter::describe() const {
  return concat("CompressedReduceScatter(", codec_->name(), ", divided by ", divisor_, ", ranks ",
                exchange_.group().size, feedback_ ? ", error feedback" : "",
                checksum_text(exchange_.checksum()), ")");
}

}  // namespace bagua
