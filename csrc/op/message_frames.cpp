#include "op/message_frames.h"

#include <utility>

#include <ATen/Context.h>
#include <ATen/ops/empty.h>

namespace bagua {
namespace {

constexpr int64_t kFrameWords = kFrameBytes / 8;

// The frames of all rows as one tensor of words.
at::Tensor frames_of(const at::Tensor& buffer, int64_t stride, size_t rows) {
  return buffer.view(at::kLong).as_strided({static_cast<int64_t>(rows), kFrameWords},
                                           {stride / 8, 1}, buffer.storage_offset() / 8);
}

// Only copies from or to pinned memory run in stream order without the thread's waiting.
at::Tensor host_words(size_t rows) {
  return at::empty({static_cast<int64_t>(rows), kFrameWords},
                   at::TensorOptions(at::kLong).pinned_memory(at::globalContext().hasCUDA()));
}

std::byte* row_of(const at::Tensor& words, size_t row) {
  return static_cast<std::byte*>(words.data_ptr()) + row * kFrameBytes;
}

}  // namespace

void DeviceFrames::write(const at::Tensor& buffer, int64_t stride,
                         const std::vector<Frame>& frames) const {
  const at::Tensor words = host_words(frames.size());
  for (size_t row = 0; row < frames.size(); ++row) write_frame(frames[row], row_of(words, row));
  frames_of(buffer, stride, frames.size()).copy_(words.to(device_, /*non_blocking=*/true));
}

void DeviceFrames::fetch(const at::Tensor& buffer, int64_t stride, std::vector<Frame> expected,
                         std::vector<int> peers) {
  at::Tensor words = host_words(peers.size());
  words.copy_(frames_of(buffer, stride, peers.size()).contiguous(), /*non_blocking=*/true);
  fetched_.push_back({std::move(words), std::move(expected), std::move(peers)});
  fetched_until_.clear();
  fetched_until_.note_current_stream();
  fetched_until_.record();
}

void DeviceFrames::check(const std::string& bucket) {
  if (fetched_.empty()) return;
  fetched_until_.synchronize();
  for (const Fetched& fetched : std::exchange(fetched_, {})) {
    for (size_t row = 0; row < fetched.peers.size(); ++row) {
      if (fetched.peers[row] < 0) continue;
      check_frame(row_of(fetched.words, row), fetched.expected[row], fetched.peers[row], bucket);
    }
  }
}

}  // namespace bagua
