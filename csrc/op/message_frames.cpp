#include "op/message_frames.h"

#include <utility>

#include "comm/host_memory.h"

namespace bagua {
namespace {

constexpr int64_t kFrameWords = kFrameBytes / 8;

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

}  // namespace

void DeviceFrames::write(const at::Tensor& buffer, int64_t stride,
                         const std::vector<Frame>& frames) const {
  const at::Tensor words = host_words(frames.size(), buffer.device());
  for (size_t row = 0; row < frames.size(); ++row) write_frame(frames[row], row_of(words, row));
  frames_of(buffer, stride, frames.size()).copy_(words.to(buffer.device(), /*non_blocking=*/true));
}

void DeviceFrames::fetch(const at::Tensor& buffer, int64_t stride, std::vector<Frame> expected,
                         std::vector<int> peers) {
  at::Tensor words = host_words(peers.size(), buffer.device());
  words.copy_(frames_of(buffer, stride, peers.size()).contiguous(), /*non_blocking=*/true);
  fetched_.push_back({std::move(words), std::move(expected), std::move(peers)});
  if (!fetched_until_) fetched_until_.emplace(buffer.device());
  fetched_until_->mark_current_stream();
}

void DeviceFrames::check(const std::string& bucket) {
  if (fetched_.empty()) return;
  fetched_until_->synchronize();
  for (const Fetched& fetched : std::exchange(fetched_, {})) {
    for (size_t row = 0; row < fetched.peers.size(); ++row) {
      if (fetched.peers[row] < 0) continue;
      check_frame(row_of(fetched.words, row), fetched.expected[row], fetched.peers[row], bucket);
    }
  }
}

}  // namespace bagua
