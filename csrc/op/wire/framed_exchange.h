// Exchange of payloads between ranks: frames, checksums, segments and the order of receives.
#pragma once

#include <cstdint>
#include <functional>
#include <memory>
#include <span>
#include <vector>

#include <ATen/core/Tensor.h>

#include "comm/communicator.h"
#include "op/contract/bucket_op.h"
#include "op/wire/device_frames.h"
#include "op/wire/frame.h"
#include "op/wire/part_layout.h"

namespace bagua {

// Memory for payloads and their frames, one row of `stride` bytes each.
struct PayloadRows {
  at::Tensor bytes;
  int64_t stride;

  std::byte* row(int64_t index) const {
    return static_cast<std::byte*>(bytes.data_ptr()) + index * stride;
  }
};

// A payload on its way: its row, the rank at the other end, and how it is cut.
struct Payload {
  int64_t row;
  int peer;
  PartLayout layout;
};

// Tiles [first_tile, end_tile) of the payload received in a row.
struct ArrivedTiles {
  const Payload& payload;
  int64_t first_tile;
  int64_t end_tile;
};

// Extent of one call of `arrived` on the CPU: a message, or a segment of all payloads (which then
// are cut alike). On a device there is one call, with everything.
enum class Arrival : uint8_t { kMessage, kSegment };

// Sends payloads and receives others, each message behind a frame that says what it holds
// (docs/wire-format.md, "Frames"). On the CPU a frame, and with Checksum::kOn its payload, is
// compared before `arrived` is called; on a device when the op runs next, see
// Note [Frames on a device].
//
// Thread safety: one lane. May fail: MismatchError, naming the bucket and the peer, where a peer's
// message is of another plan or round, or damaged; and as Communicator.
class FramedExchange final {
 public:
  using OnArrived = std::function<void(std::span<const ArrivedTiles>)>;

  FramedExchange(std::shared_ptr<Communicator> communicator, Checksum checksum);

  Group group() const { return communicator_->group(); }
  Checksum checksum() const { return checksum_; }

  // Begins a run: on a device, compares what the last run has received. `kernels`: of the codec,
  // which outlives the run; null on CPU.
  void begin(const Round& round, const FrameKernels* kernels);

  // Says before the first exchange of a run what the second one, the last, will send, and receive
  // into the same rows. Rows that both send are equal, and a peer sends what the second one
  // receives once it has what the first one sends it.
  void announce(const PayloadRows& rows, std::span<const Payload> sends,
                std::span<const Payload> receives, Arrival arrival, const Round& round);

  // Payloads to send are complete in their rows, which are sorted; their frames are written here.
  void exchange(const PayloadRows& send, std::span<const Payload> sends, const PayloadRows& receive,
                std::span<const Payload> receives, Arrival arrival, const Round& round,
                const OnArrived& arrived);

  // Sends one message, a frame of this fingerprint and a payload, to all ranks. Row r of `messages`
  // becomes rank r's. All are compared before it returns.
  void all_gather(uint64_t fingerprint, at::Tensor& message, at::Tensor& messages,
                  const Round& round);

 private:
  void write_frames(const PayloadRows& rows, std::span<const Payload> payloads, const Round& round);

  std::shared_ptr<Communicator> communicator_;
  Checksum checksum_;
  const FrameKernels* kernels_ = nullptr;
  DeviceFrames device_frames_;   // unused on CPU
  std::vector<Recv> announced_;  // on CPU
};

}  // namespace bagua
