#include "comm/own_sockets.h"

#include <filesystem>
#include <mutex>
#include <system_error>
#include <vector>

#include <fcntl.h>
#include <pthread.h>
#include <sys/socket.h>
#include <sys/stat.h>
#include <unistd.h>

namespace bagua {
namespace {

struct KeptSocket {
  int number;
  ino_t inode;  // the number may be another file's by now
};

// What the handlers of fork() need. Never destroyed: a process may fork until its end.
struct KeptSockets {
  std::mutex mutex;
  std::vector<KeptSocket> sockets;
  int nothing = open("/dev/null", O_RDWR | O_CLOEXEC);
};

KeptSockets& kept() {
  static auto* const made = new KeptSockets;
  return *made;
}

bool is_open(const KeptSocket& socket) {
  struct stat status{};
  return fstat(socket.number, &status) == 0 && S_ISSOCK(status.st_mode) &&
         status.st_ino == socket.inode;
}

void before_fork() { kept().mutex.lock(); }

void after_fork_in_parent() { kept().mutex.unlock(); }

// Only calls that are allowed between fork and exec.
void after_fork_in_child() {
  for (const KeptSocket& socket : kept().sockets) {
    if (is_open(socket)) dup3(kept().nothing, socket.number, O_CLOEXEC);
  }
  kept().mutex.unlock();
}

std::set<int> open_files() {
  std::set<int> numbers;
  std::error_code error;
  for (const auto& entry : std::filesystem::directory_iterator("/proc/self/fd", error)) {
    numbers.insert(std::stoi(entry.path().filename().string()));
  }
  return numbers;
}

bool is_inheritable_tcp(int number) {
  int domain = 0, type = 0;
  socklen_t length = sizeof(int);
  const int flags = fcntl(number, F_GETFD);
  return flags >= 0 && (flags & FD_CLOEXEC) == 0 &&
         getsockopt(number, SOL_SOCKET, SO_DOMAIN, &domain, &length) == 0 &&
         getsockopt(number, SOL_SOCKET, SO_TYPE, &type, &length) == 0 &&
         (domain == AF_INET || domain == AF_INET6) && type == SOCK_STREAM;
}

}  // namespace

OpenedSockets::OpenedSockets() : before_(open_files()) {}

void OpenedSockets::keep_from_children() const {
  static std::once_flag registered;
  std::call_once(registered,
                 [] { pthread_atfork(before_fork, after_fork_in_parent, after_fork_in_child); });
  const std::lock_guard lock(kept().mutex);
  std::erase_if(kept().sockets, [](const KeptSocket& socket) { return !is_open(socket); });
  for (const int number : open_files()) {
    struct stat status{};
    if (before_.contains(number) || !is_inheritable_tcp(number)) continue;
    if (fstat(number, &status) != 0) continue;
    fcntl(number, F_SETFD, FD_CLOEXEC);
    kept().sockets.push_back({.number = number, .inode = status.st_ino});
  }
}

}  // namespace bagua
