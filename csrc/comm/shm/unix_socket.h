// Connections between processes of one host, over which they hand over memory.
#pragma once

#include <chrono>
#include <cstddef>
#include <cstdint>
#include <span>
#include <string>
#include <vector>

#include <sys/types.h>

#include "comm/shm/file_descriptor.h"

namespace bagua {

using Deadline = std::chrono::steady_clock::time_point;

// The process at the other end, as the kernel says it. 0: a process that this one cannot see.
struct PeerProcess {
  pid_t pid;
  uid_t uid;
};

// All throw Error with the system's reason, TransportError where the other end is closed. Sockets
// are closed by exec, never block, and keep messages apart.

// A socket without a file: it is known in its network namespace by its name, which is not to be
// guessed, and is gone with its process.
FileDescriptor listen_at(const std::string& name, int most_waiting);

// Not open if no one has come within `limit`.
FileDescriptor accept_within(const FileDescriptor& listening, std::chrono::milliseconds limit);

FileDescriptor connect_to(const std::string& name, Deadline deadline);

PeerProcess peer_of(const FileDescriptor& socket);

// Bytes and descriptors together. A message is far smaller than a socket's buffer.
void send_message(const FileDescriptor& socket, std::span<const std::byte> bytes,
                  std::span<const int> files);

// Fills `bytes`; false if nothing has come within `limit`. Descriptors beyond `most_files` are an
// error.
bool receive_message(const FileDescriptor& socket, std::span<std::byte> bytes,
                     std::vector<FileDescriptor>& files, size_t most_files,
                     std::chrono::milliseconds limit);

}  // namespace bagua
