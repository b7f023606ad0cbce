#include "comm/shm/unix_socket.h"

#include <algorithm>
#include <cstddef>
#include <cstring>
#include <thread>

#include <poll.h>
#include <sys/socket.h>
#include <sys/un.h>

#include "comm/shm/system_error.h"

namespace bagua {
namespace {

using std::chrono::milliseconds;

constexpr int kMostFilesOfAMessage = 4;

struct Address {
  sockaddr_un address{};
  socklen_t length;

  const sockaddr* pointer() const { return reinterpret_cast<const sockaddr*>(&address); }
};

// The name begins after a zero byte: it is of no file system.
Address address_of(const std::string& name) {
  Address result;
  result.address.sun_family = AF_UNIX;
  BAGUA_CHECK(name.size() + 1 <= sizeof result.address.sun_path, "a socket's name has ",
              name.size(), " bytes, more than there is room for");
  std::memcpy(result.address.sun_path + 1, name.data(), name.size());
  result.length = static_cast<socklen_t>(offsetof(sockaddr_un, sun_path) + 1 + name.size());
  return result;
}

// An end that the other rank has closed is the consequence of its failure.
void check_connected(bool condition, const char* call) {
  const bool closed = errno == EPIPE || errno == ECONNRESET || errno == ECONNREFUSED;
  if (!condition && closed) throw TransportError(system_error_text(call));
  BAGUA_CHECK_SYSTEM(condition, call);
}

FileDescriptor new_socket() {
  FileDescriptor socket(::socket(AF_UNIX, SOCK_SEQPACKET | SOCK_CLOEXEC | SOCK_NONBLOCK, 0));
  BAGUA_CHECK_SYSTEM(socket.is_open(), "socket");
  return socket;
}

bool wait_readable(const FileDescriptor& socket, milliseconds limit) {
  pollfd entry{.fd = socket.number(), .events = POLLIN, .revents = 0};
  const int found = poll(&entry, 1, static_cast<int>(limit.count()));
  BAGUA_CHECK_SYSTEM(found >= 0 || errno == EINTR, "poll");
  return found > 0;
}

}  // namespace

FileDescriptor listen_at(const std::string& name, int most_waiting) {
  FileDescriptor socket = new_socket();
  const Address address = address_of(name);
  BAGUA_CHECK_SYSTEM(bind(socket.number(), address.pointer(), address.length) == 0, "bind");
  BAGUA_CHECK_SYSTEM(listen(socket.number(), most_waiting) == 0, "listen");
  return socket;
}

FileDescriptor accept_within(const FileDescriptor& listening, milliseconds limit) {
  if (!wait_readable(listening, limit)) return {};
  FileDescriptor socket(
      accept4(listening.number(), nullptr, nullptr, SOCK_CLOEXEC | SOCK_NONBLOCK));
  BAGUA_CHECK_SYSTEM(socket.is_open() || errno == EAGAIN || errno == ECONNABORTED, "accept");
  return socket;
}

FileDescriptor connect_to(const std::string& name, Deadline deadline) {
  FileDescriptor socket = new_socket();
  const Address address = address_of(name);
  while (connect(socket.number(), address.pointer(), address.length) != 0) {
    // Too many wait to be accepted.
    const bool busy = errno == EAGAIN && std::chrono::steady_clock::now() < deadline;
    check_connected(busy || errno == EINTR, "connect");
    std::this_thread::sleep_for(milliseconds(5));
  }
  return socket;
}

PeerProcess peer_of(const FileDescriptor& socket) {
  ucred credentials{};
  socklen_t length = sizeof credentials;
  BAGUA_CHECK_SYSTEM(
      getsockopt(socket.number(), SOL_SOCKET, SO_PEERCRED, &credentials, &length) == 0,
      "getsockopt");
  return {.pid = credentials.pid, .uid = credentials.uid};
}

void send_message(const FileDescriptor& socket, std::span<const std::byte> bytes,
                  std::span<const int> files) {
  iovec part{.iov_base = const_cast<std::byte*>(bytes.data()), .iov_len = bytes.size()};
  alignas(cmsghdr) char control[CMSG_SPACE(kMostFilesOfAMessage * sizeof(int))] = {};
  msghdr message{};
  message.msg_iov = &part;
  message.msg_iovlen = 1;
  if (!files.empty()) {
    message.msg_control = control;
    message.msg_controllen = CMSG_SPACE(files.size_bytes());
    cmsghdr* header = CMSG_FIRSTHDR(&message);
    header->cmsg_level = SOL_SOCKET;
    header->cmsg_type = SCM_RIGHTS;
    header->cmsg_len = CMSG_LEN(files.size_bytes());
    std::memcpy(CMSG_DATA(header), files.data(), files.size_bytes());
  }
  const ssize_t sent = sendmsg(socket.number(), &message, MSG_NOSIGNAL);
  check_connected(sent >= 0, "sendmsg");
  BAGUA_CHECK(static_cast<size_t>(sent) == bytes.size(), "a socket took ", sent, " of ",
              bytes.size(), " bytes");
}

bool receive_message(const FileDescriptor& socket, std::span<std::byte> bytes,
                     std::vector<FileDescriptor>& files, size_t most_files, milliseconds limit) {
  if (!wait_readable(socket, limit)) return false;
  iovec part{.iov_base = bytes.data(), .iov_len = bytes.size()};
  alignas(cmsghdr) char control[CMSG_SPACE(kMostFilesOfAMessage * sizeof(int))] = {};
  msghdr message{};
  message.msg_iov = &part;
  message.msg_iovlen = 1;
  message.msg_control = control;
  message.msg_controllen =
      CMSG_SPACE(std::min<size_t>(most_files, kMostFilesOfAMessage) * sizeof(int));
  const ssize_t received = recvmsg(socket.number(), &message, MSG_CMSG_CLOEXEC);
  check_connected(received >= 0, "recvmsg");
  for (cmsghdr* header = CMSG_FIRSTHDR(&message); header != nullptr;
       header = CMSG_NXTHDR(&message, header)) {
    if (header->cmsg_level != SOL_SOCKET || header->cmsg_type != SCM_RIGHTS) continue;
    const size_t count = (header->cmsg_len - CMSG_LEN(0)) / sizeof(int);
    for (size_t i = 0; i < count; ++i) {
      int number = -1;
      std::memcpy(&number, CMSG_DATA(header) + i * sizeof number, sizeof number);
      files.emplace_back(number);
    }
  }
  BAGUA_CHECK((message.msg_flags & MSG_CTRUNC) == 0,
              "descriptors that were handed over were lost: raise the limit of open files "
              "(ulimit -n)");
  if (received == 0) throw TransportError("the other rank has closed the connection");
  BAGUA_CHECK(static_cast<size_t>(received) == bytes.size(), "the other rank sent ", received,
              " bytes instead of ", bytes.size());
  return true;
}

}  // namespace bagua
