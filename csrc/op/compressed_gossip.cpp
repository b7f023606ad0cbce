#include "op/compressed_gossip.h"

#include <algorithm>
#include <cmath>
#include <limits>
#include <utility>
#include <vector>

#include <ATen/Parallel.h>
#include <ATen/ScalarOps.h>
#include <ATen/ops/isfinite.h>
#include <ATen/ops/mul.h>
#include <ATen/ops/sum.h>
#include <ATen/ops/where.h>

#include "base/check.h"
#include "op/wire/codec_calls.h"

namespace bagua {
namespace {

constexpr DType kWire = DType::kFloat32;

// Elements for which products are formed at a time: with the five tensors involved, half a MiB.
constexpr int64_t kProductNumel = 16384;

bool is_replica(const at::Tensor& tensor, int64_t numel) {
  return tensor.defined() && tensor.scalar_type() == at::kFloat && tensor.dim() == 1 &&
         tensor.is_contiguous() && tensor.numel() == numel;
}

// memory += difference, which becomes the sum; see Note [Replicas stay finite]. Where the sum is
// not finite, or undefined if it is finite everywhere. On a device nobody looks, which would mean
// to wait.
at::Tensor add_where_finite(at::Tensor memory, at::Tensor difference) {
  at::Tensor& sum = difference.add_(memory);
  // A bad element makes the sum of all NaN or infinite.
  if (sum.is_cpu() && std::isfinite(at::sum(sum).item<float>())) {
    memory.copy_(sum);
    return {};
  }
  const at::Tensor finite = at::isfinite(sum);
  memory.copy_(at::where(finite, sum, memory));
  return finite.logical_not();
}

}  // namespace

// One run: the memory it works in and where the payloads lie.
struct CompressedGossip::Work {
  at::Tensor flat;  // the bucket; a copy in f32 of a bucket of f64 where kernels are fused
  PartLayout layout;
  PayloadRows send;          // one row
  PayloadRows receive;       // a row for each neighbour: left, right
  int64_t rows;              // neighbours: one if both are the same rank
  int64_t difference_numel;  // elements handled at a time
  int64_t product_numel;     // elements multiplied at a time
  at::Tensor memory;         // differences, then products, of each thread; undefined if fused
  CodecCalls calls;

  at::Tensor differences(int64_t numel) const { return of_thread(0, numel); }
  at::Tensor products(int64_t numel) const { return of_thread(difference_numel, numel); }
  // Tiles [first_tile, end_tile): their differences, and their payloads in a row.
  std::vector<Chunk> chunks(int64_t first_tile, int64_t end_tile, const at::Tensor& difference,
                            std::byte* row) const {
    std::vector<Chunk> result;
    append_chunks(result, layout, first_tile, end_tile, difference.data_ptr(), sizeof(float), row);
    return result;
  }
  // Tiles [first_tile, end_tile): their weights, and their payloads to be sent.
  std::vector<Chunk> weights(int64_t first_tile, int64_t end_tile) const {
    std::vector<Chunk> result;
    const int64_t offset = layout.first_element(first_tile) * flat.element_size();
    append_chunks(result, layout, first_tile, end_tile,
                  static_cast<std::byte*>(flat.data_ptr()) + offset, flat.element_size(),
                  send.row(0));
    return result;
  }
  ThreeArrays arrays(const Replicas& replicas) const {
    return {.x = flat.data_ptr(),
            .own = replicas.own.data_ptr<float>(),
            .left = replicas.left.data_ptr<float>(),
            .right = replicas.right.data_ptr<float>()};
  }

 private:
  at::Tensor of_thread(int64_t offset, int64_t numel) const {
    const int64_t stride = difference_numel + product_numel;
    return memory.narrow(0, at::get_thread_num() * stride + offset, numel);
  }
};

CompressedGossip::CompressedGossip(std::shared_ptr<Communicator> communicator,
                                   std::shared_ptr<const Codec> codec,
                                   std::shared_ptr<Scratch> scratch, Replicas replicas,
                                   MixingWeights mixing, Checksum checksum)
    : exchange_(std::move(communicator), checksum),
      codec_(std::move(codec)),
      scratch_(std::move(scratch)),
      replicas_(std::move(replicas)),
      mixing_(mixing) {
  BAGUA_CHECK_ARG(replicas_.own.defined(), "CompressedGossip needs three replicas.");
  const int64_t numel = replicas_.own.numel();
  for (const at::Tensor& replica : {replicas_.own, replicas_.left, replicas_.right}) {
    BAGUA_CHECK_ARG(is_replica(replica, numel),
                    "CompressedGossip: replicas must be contiguous float32 tensors of one "
                    "dimension and equal length.");
  }
  BAGUA_CHECK_ARG(!replicas_.own.is_alias_of(replicas_.left) &&
                      !replicas_.own.is_alias_of(replicas_.right) &&
                      !replicas_.left.is_alias_of(replicas_.right),
                  "CompressedGossip: replicas must be separate memory.");
  BAGUA_CHECK_ARG(mixing_.left > 0 && mixing_.right > 0 && mixing_.left + mixing_.right < 1,
                  "CompressedGossip: mixing weights ", mixing_.left, " and ", mixing_.right,
                  " must be above 0 and leave something for the rank's own weights.");
}

void CompressedGossip::check(const at::Tensor& flat, const Round& round) const {
  BAGUA_CHECK_ARG(at::isFloatingType(flat.scalar_type()), "bucket '", round.bucket, "' holds ",
                  c10::toString(flat.scalar_type()), "; only floating weights can be mixed.");
  BAGUA_CHECK_ARG(flat.numel() == replicas_.own.numel() &&
                      flat.device() == replicas_.own.device() && !flat.is_alias_of(replicas_.own) &&
                      !flat.is_alias_of(replicas_.left) && !flat.is_alias_of(replicas_.right),
                  "bucket '", round.bucket, "': replicas (", replicas_.own.numel(),
                  " elements) must be separate memory, as long as the bucket (", flat.numel(),
                  " elements) and on its device.");
}

void CompressedGossip::run(at::Tensor& flat, const Round& round) {
  check(flat, round);
  const auto [rank, size] = exchange_.group();
  if (size == 1 || flat.numel() == 0) return;
  const PartLayout layout(*codec_, kWire, flat.numel());
  const int left = (rank + size - 1) % size, right = (rank + 1) % size;
  std::vector<Payload> sends{{0, left, layout}}, receives{{0, left, layout}};
  if (right != left) {
    sends.push_back({0, right, layout});
    receives.push_back({1, right, layout});
  }
  const auto neighbours = static_cast<int64_t>(receives.size());
  // A device takes all tiles in one call, a thread of the CPU one.
  const at::Device device = flat.device();
  const bool whole = !device.is_cpu();
  const int64_t threads = whole ? 1 : std::min<int64_t>(at::get_num_threads(), layout.tiles());
  const int64_t difference_numel = whole ? flat.numel() : layout.numel(0, 1);
  const int64_t product_numel = whole ? flat.numel() : kProductNumel;
  const bool fused = codec_->fused() != nullptr;
  const bool casts = fused && flat.scalar_type() == at::kDouble;
  at::Tensor values =
      casts ? scratch_->get(Scratch::kCast, flat.numel(), at::kFloat, device).copy_(flat) : flat;
  const auto rows = [&](Scratch::Use use, int64_t count) -> PayloadRows {
    return {scratch_->get(use, count * layout.bytes(), at::kByte, device), layout.bytes()};
  };
  const Work work{
      .flat = values,
      .layout = layout,
      .send = rows(Scratch::kSend, 1),
      .receive = rows(Scratch::kReceive, neighbours),
      .rows = neighbours,
      .difference_numel = difference_numel,
      .product_numel = product_numel,
      .memory = fused ? at::Tensor()
                      : scratch_->get(Scratch::kSum, threads * (difference_numel + product_numel),
                                      at::kFloat, device),
      .calls = CodecCalls(*codec_, kWire, device, *scratch_)};
  exchange_.begin(round, codec_->frames());
  // 1.
  for_tiles(device, 0, layout.tiles(),
            [&](int64_t first, int64_t end) { encode(work, first, end); });
  // 2.
  exchange_.exchange(work.send, sends, work.receive, receives, Arrival::kSegment, round,
                     [&](std::span<const ArrivedTiles> tiles) {
                       for_tiles(device, tiles.front().first_tile, tiles.front().end_tile,
                                 [&](int64_t first, int64_t end) { apply(work, first, end); });
                     });
  if (casts) flat.copy_(values);
}

// Step 1, product by product: a fused multiply-add would not give the same bits on all devices.
void CompressedGossip::encode(const Work& work, int64_t first_tile, int64_t end_tile) const {
  if (const FusedCodec* fused = work.calls.fused()) {
    const ThreeWeights weights{.own = static_cast<float>(1 + mixing_.left + mixing_.right),
                               .left = static_cast<float>(mixing_.left),
                               .right = static_cast<float>(mixing_.right)};
    const std::vector<Chunk> chunks = work.weights(first_tile, end_tile);
    const DType dtype = codec_dtype(work.flat.scalar_type());
    return fused->encode_combined(chunks, work.arrays(replicas_), weights, dtype,
                                  work.calls.fused_scratch(chunks, dtype), work.calls.stream());
  }
  const int64_t first = work.layout.first_element(first_tile);
  const int64_t numel = work.layout.numel(first_tile, end_tile);
  at::Tensor difference = work.differences(numel);
  for (int64_t at = 0; at < numel; at += work.product_numel) {
    const int64_t count = std::min(work.product_numel, numel - at);
    at::Tensor d = difference.narrow(0, at, count);
    at::Tensor product = work.products(count);
    const auto times = [&](const at::Tensor& replica, double weight) -> const at::Tensor& {
      return at::mul_out(product, replica.narrow(0, first + at, count),
                         at::native::wrapped_scalar_tensor(weight));
    };
    d.copy_(work.flat.narrow(0, first + at, count));
    d.add_(times(replicas_.left, mixing_.left));
    d.add_(times(replicas_.right, mixing_.right));
    d.sub_(times(replicas_.own, 1 + mixing_.left + mixing_.right));
  }
  work.calls.encode(work.chunks(first_tile, end_tile, difference, work.send.row(0)));
}

void CompressedGossip::apply(const Work& work, int64_t first_tile, int64_t end_tile) const {
  if (const FusedCodec* fused = work.calls.fused()) {
    const ThreeRows rows{.own = work.send.row(0),
                         .left = work.receive.row(0),
                         .right = work.receive.row(work.rows - 1)};
    return fused->decode_add_three(work.weights(first_tile, end_tile), work.arrays(replicas_), rows,
                                   codec_dtype(work.flat.scalar_type()), work.calls.stream());
  }
  const int64_t first = work.layout.first_element(first_tile);
  const int64_t numel = work.layout.numel(first_tile, end_tile);
  at::Tensor sum = work.differences(numel);
  at::Tensor weights = work.flat.narrow(0, first, numel);
  // 3.
  work.calls.decode(work.chunks(first_tile, end_tile, sum, work.send.row(0)));
  add_where_finite(replicas_.own.narrow(0, first, numel), sum);
  weights.copy_(sum);
  // 4.
  const at::Tensor* theirs[2] = {&replicas_.left, &replicas_.right};
  for (int64_t side = 0; side < 2; ++side) {
    std::byte* row = work.receive.row(std::min(side, work.rows - 1));
    work.calls.decode(work.chunks(first_tile, end_tile, sum, row));
    const at::Tensor bad = add_where_finite(theirs[side]->narrow(0, first, numel), sum);
    if (bad.defined()) weights.masked_fill_(bad, std::numeric_limits<double>::quiet_NaN());
  }
}

std::string CompressedGossip::describe() const {
  return concat("CompressedGossip(", codec_->name(), ", ring of ", exchange_.group().size,
                checksum_text(exchange_.checksum()), ")");
}

}  // namespace bagua
