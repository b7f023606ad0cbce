#include "op/wire/device_frames.h"

#include <algorithm>
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

// The frames of all rows as one tensor of words.
at::Tensor frames_of(const at::Tensor& buffer, int64_t stride, size_t rows) {
  return buffer.view(at::kLong).as_strided({static_cast<int64_t>(rows), kFrameWords},
                                           {stride / 8, 1}, buffer.storage_offset() / 8);
}

at::Tensor host_words(size_t rows, at::Device device) {
  return host_memory({static_cast<int64_t>(rows), kFrameWords}, at::kLong, device);
}

std::byte* row_of(const at::Tensor& words, size_t row) {
  return static_cast<std::byte*>(words.data_ptr()) + row * kFrameBytes;
}

// Checksum of the payload of each row, 0 for a row without a message.
at::Tensor checksums_of(const at::Tensor& buffer, int64_t stride,
                        const std::vector<Frame>& frames) {
  std::vector<at::Tensor> checksums;
  for (size_t row = 0; row < frames.size(); ++row) {
    const auto bytes = static_cast<int64_t>(frames[row].payload_bytes);
    const auto first = static_cast<int64_t>(row) * stride + kFrameBytes;
    checksums.push_back(
        checksum_on_device(bytes == 0 ? buffer.narrow(0, 0, 0) : buffer.narrow(0, first, bytes)));
  }
  return at::stack(checksums);
}

bool with_checksum(const std::vector<Frame>& frames) {
  return frames.front().checksum == Checksum::kOn;
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

void DeviceFrames::write(const at::Tensor& buffer, int64_t stride,
                         const std::vector<Frame>& frames) const {
  if (frames.empty()) return;
  const at::Tensor words = host_words(frames.size(), buffer.device());
  for (size_t row = 0; row < frames.size(); ++row) write_frame(frames[row], row_of(words, row));
  frames_of(buffer, stride, frames.size()).copy_(words.to(buffer.device(), /*non_blocking=*/true));
  if (!with_checksum(frames)) return;
  frames_of(buffer, stride, frames.size())
      .select(1, kFrameWords - 1)
      .copy_(checksums_of(buffer, stride, frames));
}

void DeviceFrames::fetch(const at::Tensor& buffer, int64_t stride, std::vector<Frame> expected,
                         std::vector<int> peers) {
  if (peers.empty()) return;
  fetched_.fetch(frames_of(buffer, stride, peers.size()).contiguous());
  if (with_checksum(expected)) fetched_.fetch(checksums_of(buffer, stride, expected));
  expected_.push_back({std::move(expected), std::move(peers)});
}

void DeviceFrames::check(const std::string& bucket) {
  const std::vector<at::Tensor> fetched = fetched_.take();
  auto next = fetched.begin();
  for (const auto& [frames, peers] : std::exchange(expected_, {})) {
    const at::Tensor& words = *next++;
    const int64_t* checksums =
        with_checksum(frames) ? (next++)->const_data_ptr<int64_t>() : nullptr;
    for (size_t row = 0; row < peers.size(); ++row) {
      if (peers[row] == kNobody) continue;
      const uint64_t checksum = checksums ? static_cast<uint64_t>(checksums[row]) : 0;
      check_frame(row_of(words, row), frames[row], checksum, peers[row], bucket);
    }
  }
}

}  // namespace bagua
