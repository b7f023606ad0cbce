#include "op/wire/framed_exchange.h"

#include <algorithm>
#include <utility>

namespace bagua {
namespace {

struct Message {
  const Payload* payload;
  int64_t segment;
};

// Messages between two ranks are in order of segments either way.
std::vector<Message> in_order(std::span<const Payload> payloads, Arrival arrival) {
  std::vector<Message> messages;
  for (const Payload& payload : payloads) {
    for (int64_t segment = 0; segment < payload.layout.segments(); ++segment) {
      messages.push_back({&payload, segment});
    }
  }
  if (arrival == Arrival::kSegment) {
    std::ranges::stable_sort(messages, {}, &Message::segment);
  }
  return messages;
}

at::Tensor bytes_of(const PayloadRows& rows, const Message& message) {
  const PartLayout& layout = message.payload->layout;
  return rows.bytes.narrow(
      0, message.payload->row * rows.stride + layout.message_offset(message.segment),
      layout.message_bytes(message.segment));
}

std::byte* frame_at(const PayloadRows& rows, const Message& message) {
  return rows.row(message.payload->row) + message.payload->layout.message_offset(message.segment);
}

// Frames of messages in device memory, where a payload is one message, or none if it is empty. A
// row that goes to several peers has one frame.
std::vector<DeviceFrame> device_frames(const PayloadRows& rows, std::span<const Payload> payloads,
                                       const Round& round, Checksum checksum) {
  std::vector<DeviceFrame> frames;
  int64_t last = -1;
  for (const auto& [row, peer, layout] : payloads) {
    if (layout.segments() == 0 || std::exchange(last, row) == row) continue;
    frames.push_back({rows.bytes, row * rows.stride,
                      layout.frame(0, round.number, round.bucket, checksum), peer});
  }
  return frames;
}

}  // namespace

FramedExchange::FramedExchange(std::shared_ptr<Communicator> communicator, Checksum checksum)
    : communicator_(std::move(communicator)), checksum_(checksum) {}

void FramedExchange::begin(const Round& round, const FrameKernels* kernels) {
  kernels_ = kernels;
  device_frames_.check(round.bucket);
}

void FramedExchange::exchange(const PayloadRows& send, std::span<const Payload> sends,
                              const PayloadRows& receive, std::span<const Payload> receives,
                              Arrival arrival, const Round& round, const OnArrived& arrived) {
  const bool on_cpu = receive.bytes.is_cpu();
  write_frames(send, sends, round);
  const std::vector<Message> outgoing = in_order(sends, arrival);
  const std::vector<Message> incoming = in_order(receives, arrival);
  std::vector<Send> to;
  std::vector<Recv> from;
  for (const Message& message : outgoing) {
    to.push_back({bytes_of(send, message), message.payload->peer});
  }
  for (const Message& message : incoming) {
    from.push_back({bytes_of(receive, message), message.payload->peer});
  }
  if (!announced_.empty()) {
    communicator_->expect(from);
    communicator_->expect(std::exchange(announced_, {}));
  }
  std::vector<ArrivedTiles> together;
  communicator_->exchange(to, from, [&](size_t index) {
    const Message& message = incoming[index];
    const auto& [row, peer, layout] = *message.payload;
    if (on_cpu) {
      check_frame(frame_at(receive, message),
                  layout.frame(message.segment, round.number, round.bucket, checksum_), peer,
                  round.bucket);
    }
    together.push_back(
        {*message.payload, layout.first_tile(message.segment), layout.end_tile(message.segment)});
    const bool is_last = index + 1 == incoming.size();
    const bool ends_segment = !is_last && incoming[index + 1].segment != message.segment;
    if (!is_last && (!on_cpu || (arrival == Arrival::kSegment && !ends_segment))) return;
    arrived(together);
    together.clear();
  });
  if (!on_cpu) {
    device_frames_.fetch(*kernels_, device_frames(receive, receives, round, checksum_));
  }
}

void FramedExchange::all_gather(uint64_t fingerprint, at::Tensor& message, at::Tensor& messages,
                                const Round& round) {
  const int64_t bytes = message.numel();
  const Frame frame{.fingerprint = fingerprint,
                    .round = static_cast<uint64_t>(round.number),
                    .payload_bytes = static_cast<uint64_t>(bytes - kFrameBytes),
                    .checksum = checksum_};
  const PayloadRows received{.bytes = messages, .stride = bytes};
  const int size = communicator_->group().size;
  if (message.is_cpu()) {
    write_frame(frame, static_cast<std::byte*>(message.data_ptr()));
    communicator_->all_gather(message, messages);
    for (int rank = 0; rank < size; ++rank) {
      check_frame(received.row(rank), frame, rank, round.bucket);
    }
    return;
  }
  device_frames_.write(*kernels_, {{message, 0, frame, communicator_->group().rank}});
  communicator_->all_gather(message, messages);
  std::vector<DeviceFrame> arrived;
  for (int rank = 0; rank < size; ++rank) arrived.push_back({messages, rank * bytes, frame, rank});
  device_frames_.fetch(*kernels_, std::move(arrived));
}

void FramedExchange::announce(const PayloadRows& rows, std::span<const Payload> sends,
                              std::span<const Payload> receives, Arrival arrival,
                              const Round& round) {
  if (!rows.bytes.is_cpu()) {
    return device_frames_.announce(device_frames(rows, sends, round, checksum_));
  }
  announced_.clear();
  for (const Message& message : in_order(receives, arrival)) {
    announced_.push_back({bytes_of(rows, message), message.payload->peer});
  }
}

void FramedExchange::write_frames(const PayloadRows& rows, std::span<const Payload> payloads,
                                  const Round& round) {
  if (!rows.bytes.is_cpu()) {
    return device_frames_.write(*kernels_, device_frames(rows, payloads, round, checksum_));
  }
  int64_t written = -1;  // a row that goes to several peers has one frame
  for (const Payload& payload : payloads) {
    if (std::exchange(written, payload.row) == payload.row) continue;
    for (const Message& message : in_order({&payload, 1}, Arrival::kMessage)) {
      write_frame(payload.layout.frame(message.segment, round.number, round.bucket, checksum_),
                  frame_at(rows, message));
    }
  }
}

}  // namespace bagua
