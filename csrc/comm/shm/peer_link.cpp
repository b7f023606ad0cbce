#include "comm/shm/peer_link.h"

#include <poll.h>
#include <sys/syscall.h>
#include <unistd.h>

namespace bagua {

bool PeerLink::is_cut() const noexcept {
  // poll() leaves out a descriptor that is not open (-1).
  pollfd entries[] = {{.fd = socket_.number(), .events = POLLRDHUP, .revents = 0},
                      {.fd = process_.number(), .events = POLLIN, .revents = 0}};
  return poll(entries, 2, 0) > 0;
}

FileDescriptor open_process(int pid) noexcept {
  return FileDescriptor(static_cast<int>(syscall(SYS_pidfd_open, pid, 0)));
}

}  // namespace bagua
