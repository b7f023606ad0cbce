#include "op/compressed_all_reduce.h"

#include <algorithm>
#include <utility>
#include <vector>

#include <ATen/record_function.h>

#include "base/check.h"
#include "op/wire/codec_calls.h"

namespace bagua {
namespace {

DType codec_dtype(at::ScalarType type) {
  switch (type) {
    case at::kFloat:
      return DType::kFloat32;
    case at::kHalf:
      return DType::kFloat16;
    case at::kBFloat16:
      return DType::kBFloat16;
    default:
      throw Error(concat("a codec takes float32, float16, bfloat16 or float64 buckets, not ",
                         c10::toString(type),
                         ". Exclude the parameter through _bagua_params_and_buffers_to_ignore."));
  }
}

// Part boundaries: equal parts where the ranks divide the bucket (builders pad buckets so that they
// do); otherwise multiples of 16 elements with shorter, perhaps empty, parts at the end.
int64_t part_stride(int64_t numel, int parts) {
  if (numel % parts == 0) return numel / parts;
  const int64_t even = (numel + parts - 1) / parts;
  return (even + 15) / 16 * 16;
}

}  // namespace

// The parts of a bucket and the payloads of one run.
struct CompressedAllReduce::Parts {
  at::Tensor flat;
  DType dtype;
  Group group;
  int64_t stride;       // elements between parts
  PayloadRows send;     // row p: part p; my own row holds my version, then the result
  PayloadRows receive;  // row p: rank p's version of my part, then part p
  at::Tensor sum;       // f32, my part
  const Codec& codec;
  CodecCalls calls;

  int64_t first(int part) const { return std::min(flat.numel(), part * stride); }
  int64_t numel(int part) const { return std::min(stride, flat.numel() - first(part)); }
  PartLayout layout(int part) const { return {codec, dtype, numel(part)}; }

  // One payload for each other rank: part(rank) in row(rank).
  template <typename Row, typename Part>
  std::vector<Payload> with_others(Row row, Part part) const {
    std::vector<Payload> payloads;
    for (int peer = 0; peer < group.size; ++peer) {
      if (peer != group.rank) payloads.push_back({row(peer), peer, layout(part(peer))});
    }
    return payloads;
  }

  // Appends tiles of a part, whose payload is in this row.
  void append(std::vector<Chunk>& chunks, int part, const ArrivedTiles& tiles,
              const PayloadRows& rows) const {
    const auto& [payload, first_tile, end_tile] = tiles;
    const int64_t element = first(part) + payload.layout.first_element(first_tile);
    append_chunks(chunks, payload.layout, first_tile, end_tile,
                  static_cast<char*>(flat.data_ptr()) + element * dtype_bytes(dtype),
                  dtype_bytes(dtype), rows.row(payload.row));
  }
};

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
  const at::Device device = flat.device();
  at::Tensor values = flat;
  if (flat.scalar_type() == at::kDouble) {
    values = scratch_->get(Scratch::kCast, flat.numel(), at::kFloat, device);
    values.copy_(flat);
  }
  const DType dtype = codec_dtype(values.scalar_type());
  const int64_t stride = part_stride(values.numel(), group.size);
  const int64_t row_bytes = PartLayout(*codec_, dtype, stride).bytes();
  const auto rows = [&](Scratch::Use use) -> PayloadRows {
    return {scratch_->get(use, group.size * row_bytes, at::kByte, device), row_bytes};
  };
  const Parts parts{.flat = values,
                    .dtype = dtype,
                    .group = group,
                    .stride = stride,
                    .send = rows(Scratch::kSend),
                    .receive = rows(Scratch::kReceive),
                    .sum = scratch_->get(Scratch::kSum, stride, at::kFloat, device),
                    .codec = *codec_,
                    .calls = CodecCalls(*codec_, dtype, device, *scratch_)};
  const auto mine = [&](int) { return group.rank; };
  const auto theirs = [](int peer) { return peer; };
  exchange_.begin(round);
  // 1.
  const std::vector<Payload> of_others = parts.with_others(theirs, theirs);
  encode(parts, of_others);
  // 2.
  exchange_.exchange(
      parts.send, of_others, parts.receive, parts.with_others(theirs, mine), Arrival::kSegment,
      round, [&](std::span<const ArrivedTiles> tiles) {
        RECORD_FUNCTION("bagua::reduce", {});
        for_tiles(device, tiles.front().first_tile, tiles.front().end_tile,
                  [&](int64_t first, int64_t end) { reduce(parts, first, end); });  // 3. and 4.
      });
  // 5.
  std::vector<Chunk> chunks;
  exchange_.exchange(parts.send, parts.with_others(mine, mine), parts.receive,
                     parts.with_others(theirs, theirs), Arrival::kMessage, round,
                     [&](std::span<const ArrivedTiles> arrived) {
                       RECORD_FUNCTION("bagua::decode", {});
                       chunks.clear();
                       for (const ArrivedTiles& tiles : arrived) {
                         parts.append(chunks, tiles.payload.peer, tiles, parts.receive);
                       }
                       parts.calls.decode_all(chunks);
                     });
  if (!values.is_same(flat)) flat.copy_(values);
}

void CompressedAllReduce::encode(const Parts& parts, std::span<const Payload> payloads) const {
  RECORD_FUNCTION("bagua::encode", {});
  std::vector<Chunk> chunks;
  for (const Payload& payload : payloads) {
    parts.append(chunks, payload.peer, {payload, 0, payload.layout.tiles()}, parts.send);
  }
  parts.calls.encode_all(chunks);
}

// Steps 3 and 4, on CPU while a tile is in cache.
void CompressedAllReduce::reduce(const Parts& parts, int64_t first_tile, int64_t end_tile) const {
  const int rank = parts.group.rank;
  const PartLayout layout = parts.layout(rank);
  const int64_t first = layout.first_element(first_tile);
  const int64_t numel = layout.numel(first_tile, end_tile);
  at::Tensor sum = parts.sum.narrow(0, first, numel);
  at::Tensor values = parts.flat.narrow(0, parts.first(rank) + first, numel);
  const auto chunks = [&](const at::Tensor& x, const PayloadRows& rows, int row) {
    std::vector<Chunk> result;
    append_chunks(result, layout, first_tile, end_tile, x.data_ptr(), x.element_size(),
                  rows.row(row));
    return result;
  };
  const std::vector<Chunk> own = chunks(values, parts.send, rank);
  // 3.
  parts.calls.encode(own);
  sum.zero_();
  for (int peer = 0; peer < parts.group.size; ++peer) {
    parts.calls.decode_add(chunks(sum, peer == rank ? parts.send : parts.receive, peer));
  }
  if (op_ == ReduceOp::kAvg) sum.div_(parts.group.size);
  values.copy_(sum);
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
