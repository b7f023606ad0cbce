// Shows whether another rank's process lives.
#pragma once

#include <utility>

#include "comm/shm/file_descriptor.h"

namespace bagua {

// Thread safety: immutable. A stopped process lives.
class PeerLink final {
 public:
  // `socket` is connected to the other rank, which closes it when it leaves the group. `process` is
  // a pidfd of it, or not open where the system has none: a child that the rank has forked would
  // keep the socket open.
  PeerLink(FileDescriptor socket, FileDescriptor process)
      : socket_(std::move(socket)), process_(std::move(process)) {}

  bool is_cut() const noexcept;

  // For messages, which keep their order.
  const FileDescriptor& socket() const { return socket_; }

 private:
  FileDescriptor socket_;
  FileDescriptor process_;
};

// Not open where the system does not have it.
FileDescriptor open_process(int pid) noexcept;

}  // namespace bagua
