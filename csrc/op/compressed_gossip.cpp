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
#include "op/frame.h"
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

// memory += difference, which becomes the sum; see Note [Replicas stay finite]. True if the sum is
// finite everywhere.
bool add_where_finite(at::Tensor memory, at::Tensor difference) {
  at::Tensor& sum = difference.add_(memory);
  if (std::isfinite(at::sum(sum).item<float>())) {  // a bad element makes it NaN or infinite
    memory.copy_(sum);
    return true;
  }
  const at::Tensor finite = at::isfinite(sum);
  memory.copy_(at::where(finite, sum, memory));
  return finite.all().item<bool>();
}

}  // namespace

// One run: the memory it uses and where the messages lie.
struct CompressedGossip::Job {
  const at::Tensor& flat;
  PartLayout layout;
  int64_t piece_numel;
  std::vector<int> peers;  // left, then right; one if they are the same
  at::Tensor send;         // one message per segment
  at::Tensor receive;      // as many for each peer
  at::Tensor work;         // per thread: a piece of differences, and products
  const Round& round;
  const Codec& codec;

  Frame frame(int64_t segment) const {
    return {frame_fingerprint(codec.name(), static_cast<int>(kWire), flat.numel(), segment,
                              round.bucket),
            static_cast<uint64_t>(round.step),
            static_cast<uint64_t>(layout.payload_bytes(segment))};
  }
  at::Tensor message(const at::Tensor& buffer, size_t peer, int64_t segment) const {
    return buffer.narrow(0, peer * layout.bytes() + layout.message(segment),
                         layout.message_bytes(segment));
  }
  const std::byte* received(size_t peer, int64_t offset) const {
    return bytes_of(receive, peer * layout.bytes() + offset);
  }
  int64_t work_stride() const { return piece_numel + kProductNumel; }
  at::Tensor differences(int64_t numel) const {
    return work.narrow(0, at::get_thread_num() * work_stride(), numel);
  }
  at::Tensor products(int64_t numel) const {
    return work.narrow(0, at::get_thread_num() * work_stride() + piece_numel, numel);
  }
};

CompressedGossip::CompressedGossip(std::shared_ptr<Communicator> communicator,
                                   std::shared_ptr<const Codec> codec,
                                   std::shared_ptr<Scratch> scratch, Replicas replicas,
                                   MixingWeights mixing)
    : communicator_(std::move(communicator)),
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
  const int64_t piece_numel = layout.numel(0);
  const int64_t threads = std::min<int64_t>(at::get_num_threads(), layout.pieces());
  const int left = ring_left(rank, size), right = ring_right(rank, size);
  std::vector<int> peers{left};
  if (right != left) peers.push_back(right);
  const int64_t receives = static_cast<int64_t>(peers.size()) * layout.bytes();
  const at::Device device = flat.device();
  const Job job{.flat = flat,
                .layout = layout,
                .piece_numel = piece_numel,
                .peers = std::move(peers),
                .send = scratch_->get(Scratch::kSend, layout.bytes(), at::kByte, device),
                .receive = scratch_->get(Scratch::kReceive, receives, at::kByte, device),
                .work = scratch_->get(Scratch::kSum, threads * (piece_numel + kProductNumel),
                                      at::kFloat, device),
                .round = round,
                .codec = *codec_};
  at::parallel_for(0, layout.pieces(), 1, [&](int64_t begin, int64_t end) {
    for (int64_t piece = begin; piece < end; ++piece) encode_piece(job, piece);
  });
  exchange(job);
}

// Step 1, product by product: a fused multiply-add would not give the same bits on all devices.
void CompressedGossip::encode_piece(const Job& job, int64_t piece) const {
  const int64_t first = job.layout.first(piece), numel = job.layout.numel(piece);
  at::Tensor difference = job.differences(numel);
  for (int64_t at = 0; at < numel; at += kProductNumel) {
    const int64_t count = std::min(kProductNumel, numel - at);
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
  codec_->encode(difference.data_ptr(), kWire, numel, 1,
                 bytes_of(job.send, job.layout.payload(piece)), nullptr, nullptr);
}

// Step 2. Receives are in order of segments, so that a segment is complete when its last peer's
// message is there.
void CompressedGossip::exchange(const Job& job) const {
  const PartLayout& layout = job.layout;
  std::vector<Send> sends;
  std::vector<Recv> receives;
  for (int64_t segment = 0; segment < layout.segments(); ++segment) {
    write_frame(job.frame(segment), bytes_of(job.send, layout.message(segment)));
    for (size_t peer = 0; peer < job.peers.size(); ++peer) {
      sends.push_back({job.message(job.send, 0, segment), job.peers[peer]});
      receives.push_back({job.message(job.receive, peer, segment), job.peers[peer]});
    }
  }
  communicator_->exchange(sends, receives, [&](size_t message) {
    const size_t peer = message % job.peers.size();
    const auto segment = static_cast<int64_t>(message / job.peers.size());
    check_frame(job.received(peer, layout.message(segment)), job.frame(segment), job.peers[peer],
                job.round.bucket);
    if (peer != job.peers.size() - 1) return;
    at::parallel_for(layout.first_piece(segment), layout.end_piece(segment), 1,
                     [&](int64_t begin, int64_t end) {
                       for (int64_t piece = begin; piece < end; ++piece) apply_piece(job, piece);
                     });
  });
}

// Steps 2a and 2b.
void CompressedGossip::apply_piece(const Job& job, int64_t piece) const {
  const int64_t first = job.layout.first(piece), numel = job.layout.numel(piece);
  const int64_t payload = job.layout.payload(piece);
  const auto decode = [&](const std::byte* bytes) {
    at::Tensor difference = job.differences(numel);
    codec_->decode(bytes, 1, difference.data_ptr(), kWire, numel, nullptr);
    return difference;
  };
  at::Tensor weights = job.flat.narrow(0, first, numel);
  // a.
  at::Tensor sum = decode(bytes_of(job.send, payload));
  add_where_finite(replicas_.own.narrow(0, first, numel), sum);
  weights.copy_(sum);
  // b.
  const at::Tensor* theirs[2] = {&replicas_.left, &replicas_.right};
  for (size_t side = 0; side < 2; ++side) {
    const size_t peer = std::min(side, job.peers.size() - 1);
    sum = decode(job.received(peer, payload));
    if (add_where_finite(theirs[side]->narrow(0, first, numel), sum)) continue;
    weights.masked_fill_(at::isfinite(sum).logical_not(), std::numeric_limits<double>::quiet_NaN());
  }
}

std::string CompressedGossip::describe() const {
  return concat("CompressedGossip(", codec_->name(), ", ring of ", communicator_->group().size,
                ")");
}

}  // namespace bagua
