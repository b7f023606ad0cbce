// A device called cuda:0 whose memory is host memory and whose work is done at once, and which
// knows what might have happened on a real one: for programs that look for missing events without
// having a GPU.
//
// Every stream has a vector clock. An event takes over the clock of the stream it is recorded on, a
// stream or thread that waits for it joins that clock. Two accesses to the same bytes, one of them
// a write, under streams of which neither has waited for the other, are a race. So is memory freed
// while another stream than its own may still use it: the caching allocator would hand it out.
#pragma once

#include <algorithm>
#include <array>
#include <chrono>
#include <condition_variable>
#include <cstdint>
#include <functional>
#include <map>
#include <mutex>
#include <string>
#include <vector>

#include "base/check.h"

namespace bagua::fake {

constexpr int kStreams = 64;
using Clock = std::array<uint64_t, kStreams>;

// Work that a thread gives to the device, as counted on a real one.
struct Work {
  int64_t launches = 0;    // kernels, fills and copies
  int64_t transfers = 0;   // calls of a communicator
  int64_t host_waits = 0;  // for work given after Device::fall_behind()
  int64_t bytes_read = 0;
  int64_t bytes_written = 0;

  Work& operator+=(const Work& other) {
    launches += other.launches;
    transfers += other.transfers;
    host_waits += other.host_waits;
    bytes_read += other.bytes_read;
    bytes_written += other.bytes_written;
    return *this;
  }
  Work operator-(const Work& other) const {
    return {launches - other.launches, transfers - other.transfers, host_waits - other.host_waits,
            bytes_read - other.bytes_read, bytes_written - other.bytes_written};
  }
};

// The calling thread's work is added to this, or counted nowhere.
inline thread_local Work* counted = nullptr;

inline void count(const Work& work) {
  if (counted) *counted += work;
}

inline void join(Clock& into, const Clock& other) {
  for (int i = 0; i < kStreams; ++i) into[i] = std::max(into[i], other[i]);
}

// Thread safety: all methods.
class Device {
 public:
  static Device& instance() {
    static auto* device = new Device;  // outlives every tensor
    return *device;
  }

  // Work of `stream` called `what` reads or writes [begin, begin + bytes).
  void access(int stream, const std::string& what, const void* begin, size_t bytes, bool write) {
    if (bytes == 0) return;
    std::lock_guard lock(mutex_);
    Clock& clock = advance(stream);
    const auto first = reinterpret_cast<uintptr_t>(begin), end = first + bytes;
    for (const Access& other : accesses_) {
      const bool overlap = other.first < end && first < other.end;
      if (!overlap || !(write || other.write) || other.time <= clock[other.stream]) continue;
      races_.push_back(concat(what, " on stream ", stream, write ? " writes" : " reads", " what ",
                              other.what, " on stream ", other.stream,
                              other.write ? " writes" : " reads", ", and nothing orders them"));
    }
    if (write) {  // all that came before is ordered by this one
      std::erase_if(accesses_, [&](const Access& other) {
        return first <= other.first && other.end <= end && other.time <= clock[other.stream];
      });
    }
    accesses_.push_back({first, end, stream, clock[stream], write, what});
  }

  // Memory that was allocated under `stream` goes back to it.
  void release(int stream, const void* begin, size_t bytes) {
    access(stream, "the next owner of freed memory", begin, bytes, true);
    std::lock_guard lock(mutex_);
    const auto first = reinterpret_cast<uintptr_t>(begin);
    std::erase_if(accesses_,
                  [&](const Access& a) { return first <= a.first && a.end <= first + bytes; });
  }

  Clock recorded(int stream) {
    std::lock_guard lock(mutex_);
    return advance(stream);
  }
  void wait(int stream, const Clock& event) {
    std::lock_guard lock(mutex_);
    join(clocks_[stream], event);
  }
  // A host thread waits until this is done: whatever is enqueued from then on comes later.
  void await(const Clock& event) {
    std::unique_lock lock(mutex_);
    if (behind(event)) {
      ++host_waits_;
      count({.host_waits = 1});
    }
    await_collectives(lock, event);
    join(completed_, event);
  }
  void await_all() {
    std::unique_lock lock(mutex_);
    ++host_waits_;
    count({.host_waits = 1});
    Clock all{};
    for (const Clock& clock : clocks_) join(all, clock);
    await_collectives(lock, all);
    join(completed_, all);
  }
  // A host thread asks whether this is done.
  bool query(const Clock& event) {
    std::lock_guard lock(mutex_);
    if (!done(event)) return false;
    join(completed_, event);
    return true;
  }

  // A collective of `stream` that is under way until `ended`: all that the stream is given from now
  // on comes after it.
  void begin_collective(int stream, std::function<bool()> ended) {
    std::lock_guard lock(mutex_);
    collectives_.push_back({stream, advance(stream)[stream], std::move(ended)});
  }
  // Work of `stream` is done at once, so the thread that gives it stands still where the stream
  // would, and nobody counts that as a wait.
  void stand_behind_collectives(int stream) {
    std::unique_lock lock(mutex_);
    if (!collectives_.empty()) await_collectives(lock, clocks_.at(stream));
  }
  void until_a_host_waits_for_collectives() {
    std::unique_lock lock(mutex_);
    changed_.wait(lock, [this] { return waiting_ > 0; });
  }

  // From now on the device is as far as it is: what it is given later is not done when a host
  // thread asks or waits for it.
  void fall_behind() {
    std::lock_guard lock(mutex_);
    for (int stream = 0; stream < kStreams; ++stream) done_until_[stream] = clocks_[stream][stream];
    host_waits_ = 0;
  }
  // How often host threads have waited for what came after fall_behind(), or for all.
  int64_t host_waits() {
    std::lock_guard lock(mutex_);
    return host_waits_;
  }

  // `stream` was given a copy from or to host memory.
  void copies_host_memory(int stream) {
    std::lock_guard lock(mutex_);
    host_copies_.at(stream) = advance(stream)[stream];
  }
  // Whether host threads have seen the end of all such copies.
  bool has_copied_host_memory(int stream) {
    std::lock_guard lock(mutex_);
    return completed_[stream] >= host_copies_.at(stream);
  }

  // Accesses so far are ordered before all to come.
  void forget() {
    std::lock_guard lock(mutex_);
    accesses_.clear();
  }

  std::vector<std::string> take_races() {
    std::lock_guard lock(mutex_);
    return std::exchange(races_, {});
  }

 private:
  struct Access {
    uintptr_t first;
    uintptr_t end;
    int stream;
    uint64_t time;
    bool write;
    std::string what;
  };

  struct Collective {
    int stream;
    uint64_t time;
    std::function<bool()> ended;
  };

  bool done(const Clock& event) {
    std::erase_if(collectives_, [](const Collective& collective) { return collective.ended(); });
    return std::none_of(collectives_.begin(), collectives_.end(), [&](const Collective& running) {
      return event[running.stream] >= running.time;
    });
  }

  bool behind(const Clock& event) const {
    for (int stream = 0; stream < kStreams; ++stream) {
      if (event[stream] > done_until_[stream]) return true;
    }
    return false;
  }

  void await_collectives(std::unique_lock<std::mutex>& lock, const Clock& event) {
    ++waiting_;
    changed_.notify_all();
    while (!done(event)) changed_.wait_for(lock, std::chrono::milliseconds(1));
    --waiting_;
  }

  Clock& advance(int stream) {
    Clock& clock = clocks_.at(stream);
    join(clock, completed_);
    ++clock[stream];
    return clock;
  }

  std::mutex mutex_;
  std::condition_variable changed_;
  std::vector<Collective> collectives_;
  int waiting_ = 0;  // host threads
  int64_t host_waits_ = 0;
  Clock done_until_{};
  std::array<Clock, kStreams> clocks_{};
  Clock completed_{};
  Clock host_copies_{};  // by stream, the last one's time
  std::vector<Access> accesses_;
  std::vector<std::string> races_;
};

int current_stream();  // of the calling thread

}  // namespace bagua::fake
