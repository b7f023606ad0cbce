// A bucket cut into one part per rank, and its parts as payloads of a codec.
#pragma once

#include <algorithm>
#include <cstdint>
#include <functional>
#include <memory>
#include <span>
#include <vector>

#include <ATen/core/Tensor.h>

#include "codec/codec.h"
#include "comm/communicator.h"
#include "ledger/scratch.h"
#include "op/wire/codec_calls.h"
#include "op/wire/framed_exchange.h"

namespace bagua {

// The parts of a bucket and the payloads of one run. Ownership: refers to codec and scratch.
struct BucketParts {
  at::Tensor flat;  // f32, f16 or bf16
  DType dtype;
  Group group;
  int64_t stride;       // elements between parts
  PayloadRows send;     // row p: part p
  PayloadRows receive;  // row p: rank p's version of this rank's part
  const Codec& codec;
  CodecCalls calls;

  int64_t first(int part) const { return std::min(flat.numel(), part * stride); }
  int64_t numel(int part) const { return std::min(stride, flat.numel() - first(part)); }
  PartLayout layout(int part) const { return {codec, dtype, numel(part)}; }
  at::Tensor part(int part) const { return flat.narrow(0, first(part), numel(part)); }

  // Appends tiles of part `part`, whose payload is in a row.
  void append(std::vector<Chunk>& chunks, int part, const ArrivedTiles& tiles,
              const PayloadRows& rows) const;

  // One payload for each other rank: part(rank) in row(rank).
  template <typename Row, typename Part>
  std::vector<Payload> with_others(Row row, Part part) const {
    std::vector<Payload> payloads;
    for (int peer = 0; peer < group.size; ++peer) {
      if (peer != group.rank) payloads.push_back({row(peer), peer, layout(part(peer))});
    }
    return payloads;
  }

  // Each other rank's part, in its row, for or from it.
  std::vector<Payload> of_others() const {
    const auto theirs = [](int peer) { return peer; };
    return with_others(theirs, theirs);
  }

  // This rank's part, in its row, for each other rank.
  std::vector<Payload> own_to_others() const {
    const auto mine = [this](int) { return group.rank; };
    return with_others(mine, mine);
  }
};

// `flat` as codecs take it: itself, or a copy in f32 of f64. Throws Error for another dtype.
at::Tensor codec_values(const at::Tensor& flat, Scratch& scratch);

// Elements between the parts of a bucket: the first one's.
int64_t part_stride(int64_t numel, int parts);

// Parts of `values` with memory for their payloads. Where the ranks divide the bucket (builders pad
// buckets so that they do), parts are equal; otherwise multiples of 16 elements with shorter,
// perhaps empty, parts at the end.
BucketParts cut(const at::Tensor& values, Group group, const Codec& codec, Scratch& scratch);

// Throws std::invalid_argument, naming the bucket, unless the ranks divide it.
void check_divides(const at::Tensor& flat, Group group, const Round& round);

// Tiles [first, end) of this rank's part, whose versions of all other ranks have arrived.
using OnTiles = std::function<void(int64_t first, int64_t end)>;

// Values of a bucket after they have been encoded.
enum class Encoded {
  kUnchanged,  // encodes the other ranks' parts
  kResidual,   // encodes this rank's part, too; values, of f32, become what is lost of them
  kBefore,     // nothing: the payloads are in their rows
};

// Encodes all parts, this rank's too, and makes of the values what they decode to.
void round_trip(const BucketParts& parts);

// Decodes all parts, this rank's too, from the rows to send.
void decode_all(const BucketParts& parts);

// Encodes the other ranks' parts and exchanges them: part p goes to rank p, and every rank's
// version of this rank's part arrives in its row. `arrived` is called for each segment that is
// there from all ranks: tile by tile, several threads at once, on the CPU.
void scatter(FramedExchange& exchange, const BucketParts& parts, const Round& round,
             const OnTiles& arrived, Encoded encoded = Encoded::kUnchanged);

// Says before scatter() that gather() follows in this run (FramedExchange::announce).
void announce_gather(FramedExchange& exchange, const BucketParts& parts, const Round& round);

// Sends this rank's row of `send`, its encoded part, to all ranks. Theirs arrive in the other rows
// of `send`, and are decoded into the bucket as they do.
void gather(FramedExchange& exchange, const BucketParts& parts, const Round& round);

// Tiles [first, end) of this rank's part as chunks: `x` from its first element on, the payload in a
// row.
std::vector<Chunk> own_chunks(const BucketParts& parts, const at::Tensor& x,
                              const PayloadRows& rows, int row, int64_t first, int64_t end);

}  // namespace bagua
