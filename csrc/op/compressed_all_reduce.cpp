#include "op/compressed_all_reduce.h"

#include <algorithm>
#include <utility>
#include <vector>

#include <ATen/record_function.h>

#include "base/check.h"
#include "op/wire/codec_calls.h"
#include "op/wire/frame.h"

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

// One run: where the parts lie and which bytes belong to them.
struct CompressedAllReduce::Job {
  at::Tensor flat;
  DType dtype;
  Group group;
  int64_t stride;      // elements between parts
  int64_t region;      // bytes between the messages of parts
  at::Tensor send;     // group.size regions; my own holds my version, then the result
  at::Tensor receive;  // group.size regions
  at::Tensor sum;      // f32, my part
  const Round& round;
  const Codec& codec;
  Checksum checksum;
  CodecCalls calls;

  PartLayout layout(int part) const { return {codec, dtype, numel(part)}; }
  int64_t first(int part) const { return std::min(flat.numel(), part * stride); }
  int64_t numel(int part) const { return std::min(stride, flat.numel() - first(part)); }
  char* values(int part, int64_t element) const {
    return static_cast<char*>(flat.data_ptr()) + (first(part) + element) * dtype_bytes(dtype);
  }
  std::byte* bytes(const at::Tensor& buffer, int slot, int64_t offset) const {
    return static_cast<std::byte*>(buffer.data_ptr()) + slot * region + offset;
  }
  at::Tensor message(const at::Tensor& buffer, int slot, const PartLayout& layout,
                     int64_t segment) const {
    return buffer.narrow(0, slot * region + layout.message(segment), layout.message_bytes(segment));
  }
  Frame frame(int part, const PartLayout& layout, int64_t segment) const {
    return {frame_fingerprint(codec.name(), static_cast<int>(dtype), numel(part), segment,
                              round.bucket),
            static_cast<uint64_t>(round.step), static_cast<uint64_t>(layout.payload_bytes(segment)),
            checksum};
  }
  // In front of a payload that is encoded, on CPU.
  void write_frame_of(int part, const PartLayout& layout, int64_t segment) const {
    write_frame(frame(part, layout, segment), bytes(send, part, layout.message(segment)));
  }
  // Of the first segment, which on a device is the only one.
  std::vector<Frame> first_frames() const {
    std::vector<Frame> frames;
    for (int part = 0; part < group.size; ++part) frames.push_back(frame(part, layout(part), 0));
    return frames;
  }
  void append(std::vector<Chunk>& chunks, int part, const PartLayout& layout, int64_t segment,
              const at::Tensor& payloads) const {
    const int64_t first = layout.first_piece(segment);
    append_chunks(chunks, layout, first, layout.end_piece(segment),
                  values(part, layout.first(first)), dtype_bytes(dtype), bytes(payloads, part, 0));
  }
  bool on_cpu() const { return flat.is_cpu(); }
};

CompressedAllReduce::CompressedAllReduce(std::shared_ptr<Communicator> communicator,
                                         std::shared_ptr<const Codec> codec,
                                         std::shared_ptr<Scratch> scratch, ReduceOp op,
                                         Checksum checksum)
    : communicator_(std::move(communicator)),
      codec_(std::move(codec)),
      scratch_(std::move(scratch)),
      op_(op),
      checksum_(checksum) {
  BAGUA_CHECK_ARG(op == ReduceOp::kSum || op == ReduceOp::kAvg,
                  "CompressedAllReduce takes ReduceOp.SUM or ReduceOp.AVG.");
}

void CompressedAllReduce::run(at::Tensor& flat, const Round& round) {
  const Group group = communicator_->group();
  if (group.size == 1 || flat.numel() == 0) return;
  at::Tensor values = flat;
  if (flat.scalar_type() == at::kDouble) {
    values = scratch_->get(Scratch::kCast, flat.numel(), at::kFloat, flat.device());
    values.copy_(flat);
  }
  const DType dtype = codec_dtype(values.scalar_type());
  const int64_t stride = part_stride(values.numel(), group.size);
  const int64_t region = PartLayout(*codec_, dtype, stride).bytes();
  const at::Device device = flat.device();
  Job job{.flat = values,
          .dtype = dtype,
          .group = group,
          .stride = stride,
          .region = region,
          .send = scratch_->get(Scratch::kSend, group.size * region, at::kByte, device),
          .receive = scratch_->get(Scratch::kReceive, group.size * region, at::kByte, device),
          .sum = scratch_->get(Scratch::kSum, stride, at::kFloat, device),
          .round = round,
          .codec = *codec_,
          .checksum = checksum_,
          .calls = CodecCalls(*codec_, dtype, device, *scratch_)};
  device_frames_.check(round.bucket);
  encode_others(job);
  scatter(job);
  gather(job);
  if (!values.is_same(flat)) flat.copy_(values);
}

// Step 1.
void CompressedAllReduce::encode_others(Job& job) {
  RECORD_FUNCTION("bagua::encode", {});
  std::vector<Chunk> chunks;
  for (int part = 0; part < job.group.size; ++part) {
    if (part == job.group.rank) continue;
    const PartLayout layout = job.layout(part);
    for (int64_t segment = 0; segment < layout.segments(); ++segment) {
      job.append(chunks, part, layout, segment, job.send);
    }
  }
  job.calls.encode_all(chunks);
  if (!job.on_cpu()) return device_frames_.write(job.send, job.region, job.first_frames());
  for (int part = 0; part < job.group.size; ++part) {
    if (part == job.group.rank) continue;
    const PartLayout layout = job.layout(part);
    for (int64_t segment = 0; segment < layout.segments(); ++segment) {
      job.write_frame_of(part, layout, segment);
    }
  }
}

// Step 2. Slot p of `receive` is rank p's version of my part. Receives are in order of segments, so
// that a segment is complete when its last peer's message is there.
void CompressedAllReduce::scatter(Job& job) {
  std::vector<Send> sends;
  std::vector<Recv> receives;
  std::vector<int> senders(job.group.size, -1);
  const int rank = job.group.rank;
  const PartLayout own = job.layout(rank);
  for (int peer = 0; peer < job.group.size; ++peer) {
    if (peer == rank) continue;
    const PartLayout layout = job.layout(peer);
    for (int64_t segment = 0; segment < layout.segments(); ++segment) {
      sends.push_back({job.message(job.send, peer, layout, segment), peer});
    }
  }
  for (int64_t segment = 0; segment < own.segments(); ++segment) {
    for (int peer = 0; peer < job.group.size; ++peer) {
      if (peer == rank) continue;
      receives.push_back({job.message(job.receive, peer, own, segment), peer});
      senders[peer] = peer;
    }
  }
  const int64_t peers = job.group.size - 1;
  communicator_->exchange(sends, receives, [&](size_t message) {
    const int64_t segment = static_cast<int64_t>(message) / peers;
    const int peer = receives[message].peer;
    if (job.on_cpu()) {
      check_frame(job.bytes(job.receive, peer, own.message(segment)), job.frame(rank, own, segment),
                  peer, job.round.bucket);
    }
    if (static_cast<int64_t>(message) % peers != peers - 1) return;
    RECORD_FUNCTION("bagua::reduce", {});
    for_pieces(job.flat.device(), own.first_piece(segment), own.end_piece(segment),
               [&](int64_t first, int64_t end) { reduce(job, first, end); });
    if (job.on_cpu()) job.write_frame_of(rank, own, segment);
  });
  if (!job.on_cpu()) {
    if (checksum_ == Checksum::kOn) {  // that of the result
      device_frames_.write(job.send.narrow(0, rank * job.region, job.region), job.region,
                           {job.frame(rank, own, 0)});
    }
    const std::vector<Frame> expected(job.group.size, job.frame(rank, own, 0));
    device_frames_.fetch(job.receive, job.region, expected, senders);
  }
}

// Steps 2a to 2c, on CPU while a piece is in cache.
void CompressedAllReduce::reduce(Job& job, int64_t first_piece, int64_t end_piece) const {
  const int rank = job.group.rank;
  const PartLayout layout = job.layout(rank);
  const int64_t first = layout.first(first_piece);
  const int64_t numel = layout.first(end_piece - 1) + layout.numel(end_piece - 1) - first;
  at::Tensor sum = job.sum.narrow(0, first, numel);
  const auto chunks = [&](void* x, int64_t element_bytes, const at::Tensor& payloads, int slot) {
    std::vector<Chunk> result;
    append_chunks(result, layout, first_piece, end_piece, x, element_bytes,
                  job.bytes(payloads, slot, 0));
    return result;
  };
  const std::vector<Chunk> own =
      chunks(job.values(rank, first), dtype_bytes(job.dtype), job.send, rank);
  // a.
  job.calls.encode(own);
  sum.zero_();
  for (int peer = 0; peer < job.group.size; ++peer) {
    const at::Tensor& payloads = peer == rank ? job.send : job.receive;
    job.calls.decode_add(chunks(sum.data_ptr(), sizeof(float), payloads, peer));
  }
  // b.
  if (op_ == ReduceOp::kAvg) sum.div_(job.group.size);
  job.flat.narrow(0, job.first(rank) + first, numel).copy_(sum);
  // c.
  job.calls.encode(own);
  job.calls.decode(own);
}

// Step 3. Slot p of `receive` is part p.
void CompressedAllReduce::gather(Job& job) {
  std::vector<Send> sends;
  std::vector<Recv> receives;
  std::vector<int64_t> segments;  // of the receives
  std::vector<int> senders(job.group.size, -1);
  const PartLayout own = job.layout(job.group.rank);
  for (int peer = 0; peer < job.group.size; ++peer) {
    if (peer == job.group.rank) continue;
    const PartLayout layout = job.layout(peer);
    for (int64_t segment = 0; segment < own.segments(); ++segment) {
      sends.push_back({job.message(job.send, job.group.rank, own, segment), peer});
    }
    for (int64_t segment = 0; segment < layout.segments(); ++segment) {
      receives.push_back({job.message(job.receive, peer, layout, segment), peer});
      segments.push_back(segment);
      senders[peer] = peer;
    }
  }
  std::vector<Chunk> chunks;
  communicator_->exchange(sends, receives, [&](size_t message) {
    const int part = receives[message].peer;
    const int64_t segment = segments[message];
    const PartLayout layout = job.layout(part);
    job.append(chunks, part, layout, segment, job.receive);
    if (job.on_cpu()) {
      check_frame(job.bytes(job.receive, part, layout.message(segment)),
                  job.frame(part, layout, segment), part, job.round.bucket);
    } else if (message + 1 < receives.size()) {
      return;  // all parts in one call
    }
    RECORD_FUNCTION("bagua::decode", {});
    job.calls.decode_all(chunks);
    chunks.clear();
  });
  if (!job.on_cpu()) device_frames_.fetch(job.receive, job.region, job.first_frames(), senders);
}

std::string CompressedAllReduce::describe() const {
  return concat("CompressedAllReduce(", codec_->name(), ", ",
                op_ == ReduceOp::kAvg ? "mean" : "sum", ", ranks ", communicator_->group().size,
                checksum_text(checksum_), ")");
}

}  // namespace bagua
