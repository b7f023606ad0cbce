#include "op/compressed_all_reduce.h"

#include <utility>
#include <vector>

#include "base/check.h"
#include "op/wire/bucket_parts.h"

namespace bagua {

CompressedAllReduce::CompressedAllReduce(std::shared_ptr<Communicator> communicator,
                                         std::shared_ptr<const Codec> codec,
                                         std::shared_ptr<Scratch> scratch, ReduceOp op,
                                         Checksum checksum)
    : exchange_(std::move(communicator), checksum),
      codec_(std::move(codec)),
      scratch_(std::move(scratch)),
      op_(op) {
  BAGUA_CHECK_ARG(op == ReduceOp::kSum || op == ReduceOp::kAvg,
                  "CompressedAllReduce takes ReduceOp.SUM or ReduceOp.AVG.");
}

void CompressedAllReduce::run(at::Tensor& flat, const Round& round) {
  const Group group = exchange_.group();
  if (group.size == 1 || flat.numel() == 0) return;
  const at::Tensor values = codec_values(flat, *scratch_);
  const BucketParts parts = cut(values, group, *codec_, *scratch_);
  // Undefined where one kernel sums and encodes.
  at::Tensor sum;
  if (codec_->fused() == nullptr) {
    sum = scratch_->get(Scratch::kSum, parts.stride, at::kFloat, flat.device());
  }
  exchange_.begin(round);
  // 1. and 2.
  scatter(exchange_, parts, round, [&](int64_t first, int64_t end) {
    reduce(parts, sum, first, end);  // 3. and 4.
  });
  // 5.
  gather(exchange_, parts, round);
  if (!values.is_same(flat)) flat.copy_(values);
}

// Steps 3 and 4: on CPU while a tile is in cache, on a device in one launch if the codec can.
void CompressedAllReduce::reduce(const BucketParts& parts, const at::Tensor& sum,
                                 int64_t first_tile, int64_t end_tile) const {
  const int rank = parts.group.rank;
  const std::vector<Chunk> own =
      own_chunks(parts, parts.part(rank), parts.send, rank, first_tile, end_tile);
  const int divisor = op_ == ReduceOp::kAvg ? parts.group.size : 1;
  if (const FusedCodec* fused = parts.calls.fused()) {
    const PayloadVersions versions{.results = parts.send.row(rank),
                                   .first = parts.receive.row(0),
                                   .stride = parts.receive.stride,
                                   .rows = parts.group.size,
                                   .own = rank};
    return fused->encode_sum(own, versions, static_cast<float>(divisor), parts.dtype,
                             parts.calls.stream());
  }
  const PartLayout layout = parts.layout(rank);
  const int64_t first = layout.first_element(first_tile);
  const int64_t numel = layout.numel(first_tile, end_tile);
  at::Tensor total = sum.narrow(0, first, numel);
  // 3.
  parts.calls.encode(own);
  total.zero_();
  for (int peer = 0; peer < parts.group.size; ++peer) {
    const PayloadRows& rows = peer == rank ? parts.send : parts.receive;
    parts.calls.decode_add(own_chunks(parts, sum, rows, peer, first_tile, end_tile));
  }
  if (divisor != 1) total.div_(divisor);
  parts.part(rank).narrow(0, first, numel).copy_(total);
  // 4.
  parts.calls.encode(own);
  parts.calls.decode(own);
}

std::string CompressedAllReduce::describe() const {
  return concat("CompressedAllReduce(", codec_->name(), ", ",
                op_ == ReduceOp::kAvg ? "mean" : "sum", ", ranks ", exchange_.group().size,
                checksum_text(exchange_.checksum()), ")");
}

}  // namespace bagua
