// Streams and events of a device through torch's device interface: no CUDA header is needed, and on
// CPU, where every effect is complete on return, all of it is nothing.
#pragma once

#include <optional>
#include <vector>

#include <c10/core/Device.h>
#include <c10/core/DeviceGuard.h>
#include <c10/core/Event.h>
#include <c10/core/Stream.h>
#include <c10/core/StreamGuard.h>

namespace bagua {

// The calling thread's current stream on `device`, which is not the CPU.
c10::Stream current_stream(c10::Device device);

// The cudaStream_t of the calling thread's current stream on `device`; null on CPU.
void* current_stream_handle(c10::Device device);

// A stream of the device's own for a thread of ours; none on CPU.
std::optional<c10::Stream> side_stream(c10::Device device);

// Sets the calling thread's device for its lifetime, if it can be set. After an asynchronous error
// of CUDA it cannot, and the end of a communicator must go on all the same; hence no exception.
class TriedDeviceGuard {
 public:
  explicit TriedDeviceGuard(c10::Device device) noexcept;

 private:
  std::optional<c10::DeviceGuard> guard_;
};

// Calls of this thread into CUDA do not end captures of graphs on other threads, as asking for an
// event or an abort would while one captures in the default mode.
void leave_captures_of_others_alone();

// Throws Error where the calling thread's current stream captures a CUDA graph: communication
// cannot be captured, and would wait for ever.
void refuse_capture(c10::Device device);

// The calling thread waits until the device has done all its work.
void synchronize(c10::Device device);

// Points in the work of one or several streams of a device that another stream waits for. Recording
// again replaces them; the events are reused. Not thread-safe.
class StreamPoints {
 public:
  explicit StreamPoints(c10::Device device) : device_(device) {}

  // Forgets what has been noted.
  void clear() { streams_.clear(); }
  // Work that the calling thread's current stream has been given, and what it will be given before
  // record().
  void note_current_stream();
  // Marks the end of the work that the noted streams have been given so far.
  void record();
  // Notes and records the calling thread's current stream.
  void mark_current_stream();
  // Work given to `stream` from now on waits for it.
  void block(const c10::Stream& stream);
  // Work given to the calling thread's current stream from now on waits for it.
  void block_current_stream();
  // The calling thread waits for it.
  void synchronize();

 private:
  c10::Device device_;
  std::vector<c10::Stream> streams_;
  std::vector<c10::Event> events_;  // at least as many as streams_
};

// The calling thread waits for all work that its current stream on `device` has been given so far.
void wait_for_current_stream(c10::Device device);

// The current stream of the calling thread on the stream's device waits for all work that `stream`
// has been given so far.
void current_stream_waits_for(const c10::Stream& stream);

}  // namespace bagua
