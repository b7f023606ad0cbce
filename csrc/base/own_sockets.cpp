#include "base/own_sockets.h"

#include <algorithm>
#include <climits>
#include <cstddef>
#include <cstdint>
#include <filesystem>
#include <iterator>
#include <map>
#include <mutex>
#include <string>
#include <string_view>
#include <system_error>
#include <utility>
#include <vector>

#include <arpa/inet.h>
#include <fcntl.h>
#include <linux/tcp.h>  // of which glibc's has no shortest round trip
#include <netinet/in.h>
#include <pthread.h>
#include <sys/socket.h>
#include <sys/stat.h>
#include <unistd.h>

namespace bagua {
namespace {

// Shorter than the time after which a router forgets an idle connection: home routers and clouds
// take four minutes and more, some firewalls one.
constexpr int kIdleSeconds = 30;
constexpr int kProbes = 3;
constexpr unsigned kSentAgain = 2;        // times
constexpr unsigned kUnansweredMs = 1000;  // a far peer on a lossy path answers sooner
constexpr size_t kMostAddresses = 4;
constexpr int kEstablished = 1;  // TCP_ESTABLISHED, which linux/tcp.h does not name

// State of the handlers of fork(). Never destroyed: a process may fork until its end.
struct KeptSockets {
  std::mutex mutex;
  std::vector<OpenFile> sockets;
  int nothing = open("/dev/null", O_RDWR | O_CLOEXEC);
};

KeptSockets& kept() {
  static auto* const made = new KeptSockets;
  return *made;
}

bool is_open(const OpenFile& socket) {
  struct stat status{};
  return fstat(socket.number, &status) == 0 && S_ISSOCK(status.st_mode) &&
         status.st_ino == socket.inode;
}

void before_fork() { kept().mutex.lock(); }

void after_fork_in_parent() { kept().mutex.unlock(); }

// Only calls that are allowed between fork and exec.
void after_fork_in_child() {
  for (const OpenFile& socket : kept().sockets) {
    if (is_open(socket)) dup3(kept().nothing, socket.number, O_CLOEXEC);
  }
  kept().mutex.unlock();
}

// The number in `link`, the link of an open file in /proc; zero unless it is a socket. fstat() of a
// file that another thread closes would be a race.
ino_t socket_inode(const std::filesystem::path& link) {
  constexpr std::string_view kSocket = "socket:[";
  std::error_code error;
  const std::string target = std::filesystem::read_symlink(link, error).string();
  return target.starts_with(kSocket) ? std::stoull(target.substr(kSocket.size())) : 0;
}

std::set<OpenFile> open_files() {
  std::set<OpenFile> files;
  std::error_code error;
  for (const auto& entry : std::filesystem::directory_iterator("/proc/self/fd", error)) {
    const int number = std::stoi(entry.path().filename().string());
    files.insert({.number = number, .inode = socket_inode(entry.path())});
  }
  // The folder itself was open; a socket may take its number next.
  std::erase_if(files, [](const OpenFile& file) { return fcntl(file.number, F_GETFD) < 0; });
  return files;
}

bool is_tcp(int number) {
  int domain = 0, type = 0;
  socklen_t length = sizeof(int);
  return getsockopt(number, SOL_SOCKET, SO_DOMAIN, &domain, &length) == 0 &&
         getsockopt(number, SOL_SOCKET, SO_TYPE, &type, &length) == 0 &&
         (domain == AF_INET || domain == AF_INET6) && type == SOCK_STREAM;
}

int port_of(const sockaddr_storage& address) {
  if (address.ss_family == AF_INET) {
    return ntohs(reinterpret_cast<const sockaddr_in&>(address).sin_port);
  }
  return ntohs(reinterpret_cast<const sockaddr_in6&>(address).sin6_port);
}

bool has_port(int number, int port) {
  for (const auto name : {getsockname, getpeername}) {
    sockaddr_storage address{};
    socklen_t length = sizeof(address);
    if (name(number, reinterpret_cast<sockaddr*>(&address), &length) == 0 &&
        port_of(address) == port)
      return true;
  }
  return false;
}

// Sockets that a listening socket accepts afterwards have its options.
void ask_after(int number, std::chrono::milliseconds silence) {
  const int limit = static_cast<int>(std::clamp<int64_t>(silence.count(), 1, INT_MAX));
  const int idle = std::clamp(limit / 1000 / (kProbes + 1), 1, kIdleSeconds), yes = 1;
  setsockopt(number, SOL_SOCKET, SO_KEEPALIVE, &yes, sizeof(yes));
  const std::pair<int, int> options[] = {{TCP_USER_TIMEOUT, limit},
                                         {TCP_KEEPIDLE, idle},
                                         {TCP_KEEPINTVL, idle},
                                         {TCP_KEEPCNT, kProbes}};
  for (const auto& [option, value] : options) {
    setsockopt(number, IPPROTO_TCP, option, &value, sizeof(value));
  }
}

// Zero unless the socket is connected, and something has been acknowledged.
std::chrono::microseconds shortest_round_trip(int number) {
  tcp_info info{};
  socklen_t length = sizeof(info);
  if (getsockopt(number, IPPROTO_TCP, TCP_INFO, &info, &length) != 0 ||
      length < offsetof(tcp_info, tcpi_min_rtt) + sizeof(info.tcpi_min_rtt) ||
      info.tcpi_state != kEstablished || info.tcpi_min_rtt == UINT32_MAX)
    return {};
  return std::chrono::microseconds(info.tcpi_min_rtt);
}

bool is_unanswered(int number) {
  tcp_info info{};
  socklen_t length = sizeof(info);
  return getsockopt(number, IPPROTO_TCP, TCP_INFO, &info, &length) == 0 && info.tcpi_unacked > 0 &&
         info.tcpi_backoff >= kSentAgain && info.tcpi_last_ack_recv >= kUnansweredMs;
}

// Empty where the socket is not connected.
std::string address_of_peer(int number) {
  sockaddr_storage address{};
  socklen_t length = sizeof(address);
  if (getpeername(number, reinterpret_cast<sockaddr*>(&address), &length) != 0) return "";
  const bool is_short = address.ss_family == AF_INET;
  const void* bytes = &reinterpret_cast<const sockaddr_in6&>(address).sin6_addr;
  if (is_short) bytes = &reinterpret_cast<const sockaddr_in&>(address).sin_addr;
  char text[INET6_ADDRSTRLEN] = "";
  const char* found = inet_ntop(address.ss_family, bytes, text, sizeof(text));
  return found ? found : "";
}

bool is_inheritable_tcp(int number) {
  const int flags = fcntl(number, F_GETFD);
  return flags >= 0 && (flags & FD_CLOEXEC) == 0 && is_tcp(number);
}

}  // namespace

OpenedSockets::OpenedSockets() : before_(open_files()) {}

void OpenedSockets::keep_from_children() const {
  static std::once_flag registered;
  std::call_once(registered,
                 [] { pthread_atfork(before_fork, after_fork_in_parent, after_fork_in_child); });
  const std::lock_guard lock(kept().mutex);
  std::erase_if(kept().sockets, [](const OpenFile& socket) { return !is_open(socket); });
  for (const OpenFile& file : open_files()) {
    if (before_.contains(file) || !is_inheritable_tcp(file.number)) continue;
    fcntl(file.number, F_SETFD, FD_CLOEXEC);
    kept().sockets.push_back(file);
  }
}

void OpenedSockets::give_up_after(std::chrono::milliseconds silence) const {
  for (const OpenFile& file : open_files()) {
    if (!before_.contains(file) && is_tcp(file.number)) ask_after(file.number, silence);
  }
}

bool OpenedSockets::is_measured(const OpenFile& file) const {
  return measured_.empty() ? !before_.contains(file) : measured_.contains(file);
}

bool OpenedSockets::control_congestion_by(const std::string& algorithm) const {
  const auto length = static_cast<socklen_t>(algorithm.size());
  bool allowed = true;
  for (const OpenFile& file : open_files()) {
    if (!is_measured(file) || !is_tcp(file.number)) continue;
    const auto* const name = algorithm.data();
    allowed &= setsockopt(file.number, IPPROTO_TCP, TCP_CONGESTION, name, length) == 0;
  }
  return allowed;
}

std::chrono::microseconds OpenedSockets::round_trip() {
  std::map<std::string, std::chrono::microseconds> shortest;  // by the peer's address
  std::set<OpenFile> found;
  for (const OpenFile& file : open_files()) {
    if (!is_tcp(file.number)) continue;
    const std::chrono::microseconds one = shortest_round_trip(file.number);
    if (one.count() == 0) continue;
    const auto known = shortest.emplace(address_of_peer(file.number), one).first;
    known->second = std::min(known->second, one);
    if (is_measured(file)) found.insert(file);
  }
  std::chrono::microseconds longest{};
  for (const OpenFile& file : found) {
    longest = std::max(longest, shortest[address_of_peer(file.number)]);
  }
  if (measured_.empty()) measured_ = std::move(found);
  return longest;
}

void torch_sockets_give_up_after(std::chrono::milliseconds silence, int store_port) {
  for (const auto [number, inode] : open_files()) {
    if (is_inheritable_tcp(number) || (is_tcp(number) && has_port(number, store_port)))
      ask_after(number, silence);
  }
}

std::vector<std::string> unreached_addresses() {
  std::vector<OpenFile> sockets;
  {
    const std::lock_guard lock(kept().mutex);
    sockets = kept().sockets;
  }
  std::set<std::string> found;
  for (const auto [number, inode] : sockets) {
    const bool is_open = socket_inode("/proc/self/fd/" + std::to_string(number)) == inode;
    if (is_open && is_unanswered(number)) found.insert(address_of_peer(number));
  }
  found.erase("");
  const size_t most = std::min(found.size(), kMostAddresses);
  return {found.begin(), std::next(found.begin(), static_cast<int64_t>(most))};
}

}  // namespace bagua
