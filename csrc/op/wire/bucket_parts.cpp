#include "op/wire/bucket_parts.h"

#include <ATen/record_function.h>

#include "base/check.h"

namespace bagua {
namespace {

// Part p, and its payload in row p of those to send.
void append_part(std::vector<Chunk>& chunks, const BucketParts& parts, int part) {
  const Payload payload{part, part, parts.layout(part)};
  parts.append(chunks, part, {payload, 0, payload.layout.tiles()}, parts.send);
}

std::vector<Chunk> all_chunks(const BucketParts& parts) {
  std::vector<Chunk> chunks;
  for (int part = 0; part < parts.group.size; ++part) append_part(chunks, parts, part);
  return chunks;
}

void encode(const BucketParts& parts, Encoded encoded) {
  if (encoded == Encoded::kBefore) return;
  RECORD_FUNCTION("bagua::encode", {});
  std::vector<Chunk> chunks;
  for (int part = 0; part < parts.group.size; ++part) {
    if (part != parts.group.rank) append_part(chunks, parts, part);
  }
  if (encoded == Encoded::kUnchanged) return parts.calls.for_all(chunks, &CodecCalls::encode);
  append_part(chunks, parts, parts.group.rank);
  parts.calls.for_all(chunks, &CodecCalls::encode_residual);
}

}  // namespace

void BucketParts::append(std::vector<Chunk>& chunks, int part, const ArrivedTiles& tiles,
                         const PayloadRows& rows) const {
  const auto& [payload, first_tile, end_tile] = tiles;
  const int64_t element = first(part) + payload.layout.first_element(first_tile);
  append_chunks(chunks, payload.layout, first_tile, end_tile,
                static_cast<char*>(flat.data_ptr()) + element * dtype_bytes(dtype),
                dtype_bytes(dtype), rows.row(payload.row));
}

int64_t part_stride(int64_t numel, int parts) {
  if (numel % parts == 0) return numel / parts;
  const int64_t even = (numel + parts - 1) / parts;
  return (even + 15) / 16 * 16;
}

at::Tensor codec_values(const at::Tensor& flat, Scratch& scratch) {
  if (flat.scalar_type() != at::kDouble) return flat;
  at::Tensor values = scratch.get(Scratch::kCast, flat.numel(), at::kFloat, flat.device());
  values.copy_(flat);
  return values;
}

BucketParts cut(const at::Tensor& values, Group group, const Codec& codec, Scratch& scratch) {
  const at::Device device = values.device();
  const DType dtype = codec_dtype(values.scalar_type());
  const int64_t stride = part_stride(values.numel(), group.size);
  const int64_t row_bytes = PartLayout(codec, dtype, stride).bytes();
  const auto rows = [&](Scratch::Use use) -> PayloadRows {
    return {scratch.get(use, group.size * row_bytes, at::kByte, device), row_bytes};
  };
  return {.flat = values,
          .dtype = dtype,
          .group = group,
          .stride = stride,
          .send = rows(Scratch::kSend),
          .receive = rows(Scratch::kReceive),
          .codec = codec,
          .calls = CodecCalls(codec, dtype, device, scratch)};
}

void check_divides(const at::Tensor& flat, Group group, const Round& round) {
  BAGUA_CHECK_ARG(flat.numel() % group.size == 0, "bucket '", round.bucket, "': ", flat.numel(),
                  " elements cannot be cut into ", group.size,
                  " equal parts, one for each rank; pad the bucket.");
}

void round_trip(const BucketParts& parts) {
  RECORD_FUNCTION("bagua::encode", {});
  const std::vector<Chunk> chunks = all_chunks(parts);
  parts.calls.for_all(chunks, &CodecCalls::encode);
  parts.calls.for_all(chunks, &CodecCalls::decode);
}

void decode_all(const BucketParts& parts) {
  RECORD_FUNCTION("bagua::decode", {});
  parts.calls.for_all(all_chunks(parts), &CodecCalls::decode);
}

void scatter(FramedExchange& exchange, const BucketParts& parts, const Round& round,
             const OnTiles& arrived, Encoded encoded) {
  const auto mine = [&](int) { return parts.group.rank; };
  const auto theirs = [](int peer) { return peer; };
  encode(parts, encoded);
  exchange.exchange(parts.send, parts.of_others(), parts.receive, parts.with_others(theirs, mine),
                    Arrival::kSegment, round, [&](std::span<const ArrivedTiles> tiles) {
                      RECORD_FUNCTION("bagua::reduce", {});
                      for_tiles(parts.flat.device(), tiles.front().first_tile,
                                tiles.front().end_tile, arrived);
                    });
}

void announce_gather(FramedExchange& exchange, const BucketParts& parts, const Round& round) {
  exchange.announce(parts.send, parts.own_to_others(), parts.of_others(), Arrival::kMessage, round);
}

void gather(FramedExchange& exchange, const BucketParts& parts, const Round& round) {
  std::vector<Chunk> chunks;
  exchange.exchange(parts.send, parts.own_to_others(), parts.send, parts.of_others(),
                    Arrival::kMessage, round, [&](std::span<const ArrivedTiles> arrived) {
                      RECORD_FUNCTION("bagua::decode", {});
                      chunks.clear();
                      for (const ArrivedTiles& tiles : arrived) {
                        parts.append(chunks, tiles.payload.peer, tiles, parts.send);
                      }
                      parts.calls.for_all(chunks, &CodecCalls::decode);
                    });
}

std::vector<Chunk> own_chunks(const BucketParts& parts, const at::Tensor& x,
                              const PayloadRows& rows, int row, int64_t first, int64_t end) {
  const PartLayout layout = parts.layout(parts.group.rank);
  std::vector<Chunk> chunks;
  append_chunks(chunks, layout, first, end,
                static_cast<char*>(x.data_ptr()) + layout.first_element(first) * x.element_size(),
                x.element_size(), rows.row(row));
  return chunks;
}

}  // namespace bagua
