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
#include "op/wire/frame.h"
#include "topology/topology.h"

namespace bagua {
namespace {

constexpr DType kWire = DType::kFloat32;

// Elements for which products are formed at a time: with the five tensors involved, half a MiB.
constexpr int64_t kProductNumel = 16384;

bool is_replica(const at::Tensor& tensor, int64_t numel) {
  return tensor.defined() && tensor.scalar_type() == at::kFloat && tensor.dim() == 1 &&
         tensor.is_contiguous() && tensor.numel() == numel;
}

std::byte* bytes_of(const at::Tensor& buffer, int64_t offset) {
  return static_cast<std::byte*>(buffer.data_ptr()) + offset;
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

// One run: the memory it uses and where the messages lie.
struct CompressedGossip::Job {
  const at::Tensor& flat;
  PartLayout layout;
  int64_t range_numel;     // elements handled at a time: a piece on CPU, all on a device
  int64_t product_numel;   // elements multiplied at a time
  std::vector<int> peers;  // left, then right; one if they are the same
  at::Tensor send;         // one message per segment
  at::Tensor receive;      // as many for each peer
  at::Tensor work;         // per thread: a range of differences, and products
  const Round& round;
  const Codec& codec;
  Checksum checksum;
  CodecCalls calls;

  Frame frame(int64_t segment) const {
    return {frame_fingerprint(codec.name(), static_cast<int>(kWire), flat.numel(), segment,
                              round.bucket),
            static_cast<uint64_t>(round.step), static_cast<uint64_t>(layout.payload_bytes(segment)),
            checksum};
  }
  at::Tensor message(const at::Tensor& buffer, size_t peer, int64_t segment) const {
    return buffer.narrow(0, peer * layout.bytes() + layout.message(segment),
                         layout.message_bytes(segment));
  }
  const std::byte* received(size_t peer, int64_t offset) const {
    return bytes_of(receive, peer * layout.bytes() + offset);
  }
  int64_t work_stride() const { return range_numel + product_numel; }
  at::Tensor differences(int64_t numel) const {
    return work.narrow(0, at::get_thread_num() * work_stride(), numel);
  }
  at::Tensor products(int64_t numel) const {
    return work.narrow(0, at::get_thread_num() * work_stride() + range_numel, numel);
  }
  // Of pieces [first_piece, end_piece).
  int64_t numel(int64_t first_piece, int64_t end_piece) const {
    return layout.first(end_piece - 1) + layout.numel(end_piece - 1) - layout.first(first_piece);
  }
  // Their differences, and their payloads in a row of `buffer`.
  std::vector<Chunk> chunks(int64_t first_piece, int64_t end_piece, const at::Tensor& difference,
                            const at::Tensor& buffer, size_t row) const {
    std::vector<Chunk> result;
    for (int64_t piece = first_piece; piece < end_piece; ++piece) {
      float* x = difference.data_ptr<float>() + layout.first(piece) - layout.first(first_piece);
      result.push_back(
          {x, bytes_of(buffer, row * layout.bytes() + layout.payload(piece)), layout.numel(piece)});
    }
    return result;
  }
  bool on_cpu() const { return flat.is_cpu(); }
};

CompressedGossip::CompressedGossip(std::shared_ptr<Communicator> communicator,
                                   std::shared_ptr<const Codec> codec,
                                   std::shared_ptr<Scratch> scratch, Replicas replicas,
                                   MixingWeights mixing, Checksum checksum)
    : communicator_(std::move(communicator)),
      codec_(std::move(codec)),
      scratch_(std::move(scratch)),
      replicas_(std::move(replicas)),
      mixing_(mixing),
      checksum_(checksum) {
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
                  "CompressedGossip: replicas must be memory of their own.");
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
                  " elements) must be memory of their own, as long as the bucket (", flat.numel(),
                  " elements) and on its device.");
}

void CompressedGossip::run(at::Tensor& flat, const Round& round) {
  check(flat, round);
  const auto [rank, size] = communicator_->group();
  if (size == 1 || flat.numel() == 0) return;
  const PartLayout layout(*codec_, kWire, flat.numel());
  const at::Device device = flat.device();
  const bool on_cpu = device.is_cpu();
  const int64_t range_numel = on_cpu ? layout.numel(0) : flat.numel();
  const int64_t product_numel = on_cpu ? kProductNumel : flat.numel();
  const int64_t threads = on_cpu ? std::min<int64_t>(at::get_num_threads(), layout.pieces()) : 1;
  const int left = ring_left(rank, size), right = ring_right(rank, size);
  std::vector<int> peers{left};
  if (right != left) peers.push_back(right);
  const int64_t receives = static_cast<int64_t>(peers.size()) * layout.bytes();
  const Job job{.flat = flat,
                .layout = layout,
                .range_numel = range_numel,
                .product_numel = product_numel,
                .peers = std::move(peers),
                .send = scratch_->get(Scratch::kSend, layout.bytes(), at::kByte, device),
                .receive = scratch_->get(Scratch::kReceive, receives, at::kByte, device),
                .work = scratch_->get(Scratch::kSum, threads * (range_numel + product_numel),
                                      at::kFloat, device),
                .round = round,
                .codec = *codec_,
                .checksum = checksum_,
                .calls = CodecCalls(*codec_, kWire, device, *scratch_)};
  device_frames_.check(round.bucket);
  for_pieces(device, 0, layout.pieces(),
             [&](int64_t first, int64_t end) { encode_pieces(job, first, end); });
  exchange(job);
}

// Step 1, product by product: a fused multiply-add would not give the same bits on all devices.
void CompressedGossip::encode_pieces(const Job& job, int64_t first_piece, int64_t end_piece) const {
  const int64_t first = job.layout.first(first_piece), numel = job.numel(first_piece, end_piece);
  at::Tensor difference = job.differences(numel);
  for (int64_t at = 0; at < numel; at += job.product_numel) {
    const int64_t count = std::min(job.product_numel, numel - at);
    at::Tensor d = difference.narrow(0, at, count);
    at::Tensor product = job.products(count);
    const auto times = [&](const at::Tensor& replica, double weight) -> const at::Tensor& {
      return at::mul_out(product, replica.narrow(0, first + at, count),
                         at::native::wrapped_scalar_tensor(weight));
    };
    d.copy_(job.flat.narrow(0, first + at, count));
    d.add_(times(replicas_.left, mixing_.left));
    d.add_(times(replicas_.right, mixing_.right));
    d.sub_(times(replicas_.own, 1 + mixing_.left + mixing_.right));
  }
  job.calls.encode(job.chunks(first_piece, end_piece, difference, job.send, 0));
}

// Step 2. Receives are in order of segments, so that a segment is complete when its last peer's
// message is there.
void CompressedGossip::exchange(const Job& job) {
  const PartLayout& layout = job.layout;
  const size_t peers = job.peers.size();
  std::vector<Send> sends;
  std::vector<Recv> receives;
  if (!job.on_cpu()) device_frames_.write(job.send, layout.bytes(), {job.frame(0)});
  for (int64_t segment = 0; segment < layout.segments(); ++segment) {
    if (job.on_cpu()) {
      write_frame(job.frame(segment), bytes_of(job.send, layout.message(segment)));
    }
    for (size_t peer = 0; peer < peers; ++peer) {
      sends.push_back({job.message(job.send, 0, segment), job.peers[peer]});
      receives.push_back({job.message(job.receive, peer, segment), job.peers[peer]});
    }
  }
  communicator_->exchange(sends, receives, [&](size_t message) {
    const size_t peer = message % peers;
    const auto segment = static_cast<int64_t>(message / peers);
    if (job.on_cpu()) {
      check_frame(job.received(peer, layout.message(segment)), job.frame(segment), job.peers[peer],
                  job.round.bucket);
    }
    if (peer != peers - 1) return;
    for_pieces(job.flat.device(), layout.first_piece(segment), layout.end_piece(segment),
               [&](int64_t first, int64_t end) { apply_pieces(job, first, end); });
  });
  if (!job.on_cpu()) {
    device_frames_.fetch(job.receive, layout.bytes(), std::vector<Frame>(peers, job.frame(0)),
                         job.peers);
  }
}

// Steps 2a and 2b.
void CompressedGossip::apply_pieces(const Job& job, int64_t first_piece, int64_t end_piece) const {
  const int64_t first = job.layout.first(first_piece), numel = job.numel(first_piece, end_piece);
  at::Tensor sum = job.differences(numel);
  at::Tensor weights = job.flat.narrow(0, first, numel);
  // a.
  job.calls.decode(job.chunks(first_piece, end_piece, sum, job.send, 0));
  add_where_finite(replicas_.own.narrow(0, first, numel), sum);
  weights.copy_(sum);
  // b.
  const at::Tensor* theirs[2] = {&replicas_.left, &replicas_.right};
  for (size_t side = 0; side < 2; ++side) {
    const size_t peer = std::min(side, job.peers.size() - 1);
    job.calls.decode(job.chunks(first_piece, end_piece, sum, job.receive, peer));
    const at::Tensor bad = add_where_finite(theirs[side]->narrow(0, first, numel), sum);
    if (bad.defined()) weights.masked_fill_(bad, std::numeric_limits<double>::quiet_NaN());
  }
}

std::string CompressedGossip::describe() const {
  return concat("CompressedGossip(", codec_->name(), ", ring of ", communicator_->group().size,
                checksum_text(checksum_), ")");
}

}  // namespace bagua
