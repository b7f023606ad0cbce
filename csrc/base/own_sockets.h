// Sockets of a job: they end with the process that has opened them, and stay alive while idle.
#pragma once

#include <chrono>
#include <compare>
#include <set>
#include <string>
#include <vector>

#include <sys/types.h>

namespace bagua {

// An open file of this process. Its number may be another file's a moment later.
struct OpenFile {
  int number;
  ino_t inode;  // zero unless it is a socket

  auto operator<=>(const OpenFile&) const = default;
};

// Note [Sockets and children]
// The other ranks learn of a killed one when the kernel closes its sockets, which it does when no
// process has them any more. gloo opens its own without close-on-exec, so that a data loader, a
// tokenizer or a daemon that outlives its parent would keep them open, and the news back until the
// timeout. So the TCP sockets that are opened while a transport connects are made close-on-exec,
// and in a forked child they are replaced by /dev/null: their numbers stay taken, since the child
// has copies of the objects that use them.
//
// Thread safety: one thread per object. Sockets that other threads open meanwhile without
// close-on-exec, as Python never does, count as the transport's.
class OpenedSockets {
 public:
  OpenedSockets();  // from now on

  // Keeps those that have been opened since from children of this process.
  void keep_from_children() const;

  // Has those that have been opened since ask the other side for a sign of life when they are idle,
  // so that no router on the way forgets them, and has calls on them fail when it has acknowledged
  // nothing for `silence`: behind a cut link they would wait for a quarter of an hour. A process
  // that is stopped still acknowledges.
  void give_up_after(std::chrono::milliseconds silence) const;

  // Sets the kernel's congestion control of this name for them, or, after round_trip(), for those
  // that it measured. Returns whether the kernel allows it to this process.
  bool control_congestion_by(const std::string& algorithm) const;

  // The longest time that a message takes there and back, of those connections that were there at
  // the first call that found one. It is the shortest that the kernel has seen of any connection of
  // this process to the same address, so that late answers and queues do not count: what somebody
  // has just sent over a slow link may be before all messages of a new connection. Zero where there
  // is none, or the kernel tells nothing.
  std::chrono::microseconds round_trip();

 private:
  // Whether an open file is one of those that round_trip() measures, if it is a connection.
  bool is_measured(const OpenFile& file) const;

  std::set<OpenFile> before_;
  std::set<OpenFile> measured_;
};

// As `give_up_after`, for sockets that others have opened before bagua: those of torch's groups,
// which gloo leaves without close-on-exec, and those of a store with `store_port`.
void torch_sockets_give_up_after(std::chrono::milliseconds silence, int store_port);

// Addresses, at most four, of peers of the sockets that are kept from children, which have
// acknowledged nothing for over a second of data that was sent again and again: the path there, or
// the path back, loses all packets, or the large ones.
std::vector<std::string> unreached_addresses();

}  // namespace bagua
