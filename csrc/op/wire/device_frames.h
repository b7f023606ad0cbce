// Frames of messages in device memory.
#pragma once

#include <string>
#include <vector>

#include <ATen/core/Tensor.h>

#include "codec/frame_kernels.h"
#include "ledger/late_values.h"
#include "op/wire/frame.h"

namespace bagua {

// payload_checksum() of a payload in device memory (or any), in stream order: an i64 without
// dimensions. `payload`: bytes, at a multiple of 4 in its storage.
at::Tensor checksum_on_device(const at::Tensor& payload);

// The frame of the message that begins at byte `offset` of `buffer`.
struct DeviceFrame {
  at::Tensor buffer;
  int64_t offset;
  Frame frame;
  int peer;  // the rank at the other end

  std::byte* place() const { return static_cast<std::byte*>(buffer.data_ptr()) + offset; }
};

// Note [Frames on a device]
// On CPU a received frame is compared before anything behind it is decoded. On a device that would
// make the lane wait for every message. There the frames of a round are fetched in stream order,
// and compared when the op runs next: a mismatch fails the round after it. (That ranks run the same
// plan was agreed before the round began, and a codec decodes any bytes without harm.) The same
// holds for checksums: what was corrupted is found a round later than on CPU.
//
// A launch for 32 bytes takes as long as one for a megabyte. So a run whose messages lie in memory
// that it does not use again writes all its frames in one launch and fetches all in another: it
// announces the frames of its second exchange before the first one.
//
// Thread safety: one lane.
class DeviceFrames {
 public:
  // Frames that a later write() of this run gets: the next write() writes them too, and fetch()
  // leaves what it is given to the fetch() behind that later one.
  void announce(std::vector<DeviceFrame> frames);

  // Writes the frames of messages whose payloads, with Checksum::kOn, have been enqueued.
  void write(const FrameKernels& kernels, const std::vector<DeviceFrame>& frames);

  // Fetches the frames of messages that peers have sent.
  void fetch(const FrameKernels& kernels, std::vector<DeviceFrame> frames);

  // Compares all that has been fetched and forgets it. Throws as check_frame does.
  void check(const std::string& bucket);

 private:
  struct Expected {
    Frame frame;
    int peer;
  };

  at::Tensor words_for(int64_t frames, at::Device device);

  std::vector<DeviceFrame> announced_;
  std::vector<const std::byte*> ahead_;  // places of frames that have been written ahead
  std::vector<DeviceFrame> arrived_;     // not fetched yet
  std::vector<Expected> expected_;       // in the order of what was fetched
  LateValues words_;
  LateValues checksums_;           // with Checksum::kOn, of the same messages
  std::vector<at::Tensor> spare_;  // memory for words_, on the host
};

}  // namespace bagua
