#include "op/wire/device_frames.h"

#include <algorithm>
#include <iterator>
#include <utility>

#include <ATen/ops/arange.h>
#include <ATen/ops/full.h>
#include <ATen/ops/stack.h>

#include "comm/host_memory.h"
#include "math/checksum.h"

namespace bagua {
namespace {

constexpr int64_t kFrameWords = kFrameBytes / 8;
constexpr int64_t kLowWord = 0xffffffff;

// Words that are multiplied at a time: each takes 32 bytes for a while.
constexpr int64_t kWordsAtOnce = int64_t{1} << 22;

bool has_checksum(const DeviceFrame& frame) { return frame.frame.checksum == Checksum::kOn; }

at::Tensor checksum_of(const DeviceFrame& frame) {
  return checksum_on_device(frame.buffer.narrow(0, frame.offset + kFrameBytes,
                                                static_cast<int64_t>(frame.frame.payload_bytes)));
}

// The frame's last word.
at::Tensor checksum_word(const DeviceFrame& frame) {
  return frame.buffer.narrow(0, frame.offset + kFrameBytes - 8, 8).view(at::kLong).squeeze(0);
}

}  // namespace

at::Tensor checksum_on_device(const at::Tensor& payload) {
  const at::Tensor words = payload.view(at::kInt);
  const auto options = payload.options().dtype(at::kLong);
  at::Tensor sum = at::full({}, payload.numel(), options);
  for (int64_t first = 0; first < words.numel(); first += kWordsAtOnce) {
    const int64_t count = std::min(kWordsAtOnce, words.numel() - first);
    at::Tensor products = words.narrow(0, first, count).to(at::kLong).bitwise_and_(kLowWord);
    const at::Tensor places = at::arange(first, first + count, options);
    products.mul_(places.mul(static_cast<int64_t>(kChecksumStep)).bitwise_and_(kLowWord).add_(1));
    sum.add_(products.sum());
  }
  return sum;
}

void DeviceFrames::announce(std::vector<DeviceFrame> frames) { announced_ = std::move(frames); }

void DeviceFrames::write(const FrameKernels& kernels, const std::vector<DeviceFrame>& frames) {
  std::vector<PlacedFrame> placed;
  for (const DeviceFrame& frame : frames) {
    if (std::erase(ahead_, frame.place()) > 0) continue;
    placed.push_back({frame.place(), frame_words(frame.frame, 0)});
  }
  const std::vector<DeviceFrame> announced = std::exchange(announced_, {});
  for (const DeviceFrame& frame : announced) {
    placed.push_back({frame.place(), frame_words(frame.frame, 0)});
    ahead_.push_back(frame.place());
  }
  if (!placed.empty()) {
    const at::Tensor& buffer = (frames.empty() ? announced : frames).front().buffer;
    kernels.write(placed, current_stream_handle(buffer.device()));
  }
  for (const DeviceFrame& frame : frames) {
    if (has_checksum(frame)) checksum_word(frame).copy_(checksum_of(frame));
  }
}

void DeviceFrames::fetch(const FrameKernels& kernels, std::vector<DeviceFrame> frames) {
  std::ranges::move(frames, std::back_inserter(arrived_));
  if (!ahead_.empty() || arrived_.empty()) return;
  const std::vector<DeviceFrame> all = std::exchange(arrived_, {});
  const at::Device device = all.front().buffer.device();
  std::vector<const std::byte*> places;
  std::vector<at::Tensor> checksums;
  for (const DeviceFrame& frame : all) {
    places.push_back(frame.place());
    expected_.push_back({frame.frame, frame.peer});
    if (has_checksum(frame)) checksums.push_back(checksum_of(frame));
  }
  at::Tensor words = words_for(static_cast<int64_t>(all.size()), device);
  kernels.read(places, static_cast<FrameWords*>(words.mutable_data_ptr()),
               current_stream_handle(device));
  used_by_current_stream(words, device);
  words_.expect(std::move(words), device);
  if (!checksums.empty()) checksums_.fetch(at::stack(checksums));
}

at::Tensor DeviceFrames::words_for(int64_t frames, at::Device device) {
  at::Tensor words;
  if (!spare_.empty()) {
    words = std::move(spare_.back());
    spare_.pop_back();
  }
  if (!words.defined() || words.size(0) != frames) {
    words = host_memory({frames, kFrameWords}, at::kLong, device);
  }
  return words;
}

void DeviceFrames::check(const std::string& bucket) {
  announced_.clear();
  ahead_.clear();
  arrived_.clear();
  const std::vector<Expected> expected = std::exchange(expected_, {});
  std::vector<FrameWords> seen;
  for (at::Tensor& words : words_.take()) {
    const auto* rows = static_cast<const FrameWords*>(words.const_data_ptr());
    seen.insert(seen.end(), rows, rows + words.size(0));
    spare_.push_back(std::move(words));
  }
  std::vector<int64_t> checksums;
  for (const at::Tensor& fetched : checksums_.take()) {
    const auto* values = fetched.const_data_ptr<int64_t>();
    checksums.insert(checksums.end(), values, values + fetched.numel());
  }
  for (size_t i = 0; i < expected.size(); ++i) {
    const uint64_t checksum = checksums.empty() ? 0 : static_cast<uint64_t>(checksums[i]);
    check_frame(seen[i], expected[i].frame, checksum, expected[i].peer, bucket);
  }
}

}  // namespace bagua
