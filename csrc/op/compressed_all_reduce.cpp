#include "op/compressed_all_reduce.h"

#include <ATen/Parallel.h>

#include <algorithm>
#include <utility>
#include <vector>

#include "base/check.h"
#include "op/frame.h"

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
  int64_t stride;   // elements between parts
  int64_t region;   // bytes between the parts' frames
  at::Tensor send;  // group.size regions: frame and payload of each part
  at::Tensor receive;
  at::Tensor sum;  // f32, my part
  const Round& round;
  const std::string& codec;

  int64_t first(int part) const { return std::min(flat.numel(), part * stride); }
  int64_t numel(int part) const { return std::min(stride, flat.numel() - first(part)); }
  char* values(int part) const {
    return static_cast<char*>(flat.data_ptr()) + first(part) * dtype_bytes(dtype);
  }
  static std::byte* bytes(const at::Tensor& buffer, int64_t offset) {
    return static_cast<std::byte*>(buffer.data_ptr()) + offset;
  }
  std::byte* payload(const at::Tensor& buffer, int part) const {
    return bytes(buffer, part * region + kFrameBytes);
  }
  at::Tensor message(const at::Tensor& buffer, int slot, const PartLayout& layout) const {
    return buffer.narrow(0, slot * region, kFrameBytes + layout.bytes());
  }
  Frame frame(int part, const PartLayout& layout) const {
    return {frame_fingerprint(codec, static_cast<int>(dtype), numel(part), round.bucket),
            static_cast<uint64_t>(round.step), static_cast<uint64_t>(layout.bytes())};
  }
};

CompressedAllReduce::CompressedAllReduce(std::shared_ptr<Communicator> communicator,
                                         std::shared_ptr<const Codec> codec,
                                         std::shared_ptr<Scratch> scratch, ReduceOp op)
    : communicator_(std::move(communicator)),
      codec_(std::move(codec)),
      scratch_(std::move(scratch)),
      op_(op) {
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
  const int64_t region = kFrameBytes + PartLayout(*codec_, dtype, stride).bytes();
  Job job{.flat = values,
          .dtype = dtype,
          .group = group,
          .stride = stride,
          .region = region,
          .send = scratch_->get(Scratch::kSend, group.size * region, at::kByte, flat.device()),
          .receive = scratch_->get(Scratch::kReceive, group.size * region, at::kByte, flat.device()),
          .sum = scratch_->get(Scratch::kSum, stride, at::kFloat, flat.device()),
          .round = round,
          .codec = codec_->name()};
  encode_all(job);
  scatter(job);
  reduce_own(job);
  gather(job);
  decode_all(job);
  if (!values.is_same(flat)) flat.copy_(values);
}

// Step 1.
void CompressedAllReduce::encode_all(Job& job) const {
  for (int part = 0; part < job.group.size; ++part) {
    const PartLayout layout(*codec_, job.dtype, job.numel(part));
    write_frame(job.frame(part, layout), Job::bytes(job.send, part * job.region));
    at::parallel_for(0, layout.pieces(), 1, [&](int64_t begin, int64_t end) {
      for (int64_t i = begin; i < end; ++i) {
        codec_->encode(job.values(part) + layout.first(i) * dtype_bytes(job.dtype), job.dtype,
                       layout.numel(i), 1, job.payload(job.send, part) + layout.offset(i), nullptr,
                       nullptr);
      }
    });
  }
}

// Step 2. Slot p of `receive` is rank p's version of my part.
void CompressedAllReduce::scatter(Job& job) const {
  std::vector<Send> sends;
  std::vector<Recv> receives;
  const PartLayout own(*codec_, job.dtype, job.numel(job.group.rank));
  for (int peer = 0; peer < job.group.size; ++peer) {
    if (peer == job.group.rank) continue;
    const PartLayout layout(*codec_, job.dtype, job.numel(peer));
    receives.push_back({job.message(job.receive, peer, own), peer});
    sends.push_back({job.message(job.send, peer, layout), peer});
  }
  communicator_->exchange(sends, receives);
  for (const Recv& message : receives) {
    check_frame(Job::bytes(message.tensor, 0), job.frame(job.group.rank, own), message.peer,
                job.round.bucket);
  }
}

// Steps 3 and 4, piece by piece so that a piece is summed and encoded while it is in cache. The
// result's payload replaces my own part's in `send`.
void CompressedAllReduce::reduce_own(Job& job) const {
  const int rank = job.group.rank;
  const PartLayout layout(*codec_, job.dtype, job.numel(rank));
  at::parallel_for(0, layout.pieces(), 1, [&](int64_t begin, int64_t end) {
    for (int64_t i = begin; i < end; ++i) {
      at::Tensor sum = job.sum.narrow(0, layout.first(i), layout.numel(i)).zero_();
      for (int peer = 0; peer < job.group.size; ++peer) {
        const at::Tensor& from = peer == rank ? job.send : job.receive;
        codec_->decode_add(job.payload(from, peer) + layout.offset(i), job.dtype,
                           sum.data_ptr<float>(), layout.numel(i), 1.0f, nullptr);
      }
      if (op_ == ReduceOp::kAvg) sum.div_(job.group.size);
      const void* values = sum.data_ptr();
      if (job.dtype != DType::kFloat32) {
        at::Tensor own = job.flat.narrow(0, job.first(rank) + layout.first(i), layout.numel(i));
        own.copy_(sum);
        values = own.data_ptr();
      }
      codec_->encode(values, job.dtype, layout.numel(i), 1,
                     job.payload(job.send, rank) + layout.offset(i), nullptr, nullptr);
    }
  });
}

// Step 5. Slot p of `receive` is part p.
void CompressedAllReduce::gather(Job& job) const {
  std::vector<Send> sends;
  std::vector<Recv> receives;
  const PartLayout own(*codec_, job.dtype, job.numel(job.group.rank));
  for (int peer = 0; peer < job.group.size; ++peer) {
    if (peer == job.group.rank) continue;
    const PartLayout layout(*codec_, job.dtype, job.numel(peer));
    receives.push_back({job.message(job.receive, peer, layout), peer});
    sends.push_back({job.message(job.send, job.group.rank, own), peer});
  }
  communicator_->exchange(sends, receives);
  for (const Recv& message : receives) {
    const PartLayout layout(*codec_, job.dtype, job.numel(message.peer));
    check_frame(Job::bytes(message.tensor, 0), job.frame(message.peer, layout), message.peer,
                job.round.bucket);
  }
}

// Step 6.
void CompressedAllReduce::decode_all(Job& job) const {
  for (int part = 0; part < job.group.size; ++part) {
    const PartLayout layout(*codec_, job.dtype, job.numel(part));
    const at::Tensor& from = part == job.group.rank ? job.send : job.receive;
    at::parallel_for(0, layout.pieces(), 1, [&](int64_t begin, int64_t end) {
      for (int64_t i = begin; i < end; ++i) {
        codec_->decode(job.payload(from, part) + layout.offset(i), 1,
                       job.values(part) + layout.first(i) * dtype_bytes(job.dtype), job.dtype,
                       layout.numel(i), nullptr);
      }
    });
  }
}

std::string CompressedAllReduce::describe() const {
  return concat("CompressedAllReduce(", codec_->name(), ", ",
                op_ == ReduceOp::kAvg ? "mean" : "sum", ", ranks ", communicator_->group().size,
                ")");
}

}  // namespace bagua
