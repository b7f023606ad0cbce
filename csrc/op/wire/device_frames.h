// Frames of messages in device memory.
#pragma once

#include <string>
#include <vector>

#include <ATen/core/Tensor.h>

#include "ledger/late_values.h"
#include "op/wire/frame.h"

namespace bagua {

// payload_checksum() of a payload in device memory (or any), in stream order: an i64 without
// dimensions. `payload`: bytes, at a multiple of 4 in its storage.
at::Tensor checksum_on_device(const at::Tensor& payload);

// Note [Frames on a device]
// On CPU a received frame is compared before anything behind it is decoded. On a device that would
// make the lane wait for every message. There the frames of a round are fetched in stream order,
// and compared when the op runs next: a mismatch fails the round after it. (That ranks run the same
// plan was agreed before the round began, and a codec decodes any bytes without harm.) The same
// holds for checksums: what was corrupted is found a round later than on CPU.
//
// Row r of a buffer is the r-th `stride` bytes; its message begins there. Thread safety: one lane.
class DeviceFrames {
 public:
  // Writes frames[r] to row r, whose payload, with Checksum::kOn, has been enqueued. A frame of no
  // bytes stands for a row without a message.
  void write(const at::Tensor& buffer, int64_t stride, const std::vector<Frame>& frames) const;

  static constexpr int kNobody = -1;

  // Fetches the frames of row r that peers[r] sent; kNobody: there is no message in this row.
  void fetch(const at::Tensor& buffer, int64_t stride, std::vector<Frame> expected,
             std::vector<int> peers);

  // Compares all that has been fetched and forgets it. Throws as check_frame does.
  void check(const std::string& bucket);

 private:
  struct Expected {
    std::vector<Frame> frames;
    std::vector<int> peers;
  };
  std::vector<Expected> expected_;
  LateValues fetched_;  // for each: the frames, and with Checksum::kOn the payloads' checksums
};

}  // namespace bagua
