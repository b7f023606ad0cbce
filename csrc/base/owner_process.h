// The process that an object belongs to: a forked child has a copy, but no threads or peers of it.
#pragma once

#include <utility>

#include <unistd.h>

#include "base/check.h"

namespace bagua {

// Note [Fork]
// A forked child has a copy of the parent's memory and descriptors, but none of its threads. So it
// may neither join, free nor close what has threads or is connected: that would wait for ever, or
// end the parent's connections. It may not communicate with it either.

// A pointer to what must be left alone after fork. In a child the pointee is never destroyed, and
// the owner of this asks here() or check() before it touches it.
template <typename Pointer>
class OwnersOnly {
 public:
  explicit OwnersOnly(Pointer pointer) : pointer_(std::move(pointer)) {}
  ~OwnersOnly() {
    if (!here()) new Pointer(std::move(pointer_));
  }
  OwnersOnly(const OwnersOnly&) = delete;
  OwnersOnly& operator=(const OwnersOnly&) = delete;

  bool here() const { return getpid() == process_; }

  // Throws in a child. `what`: subject of the message.
  void check(const char* what) const {
    const int here = getpid();
    BAGUA_CHECK(here == process_, what, " belongs to process ", process_, ", of which this one, ",
                here,
                ", was forked: a child cannot communicate in its parent's place. In the child use "
                "a copy of the module (copy.deepcopy() gives one that is not wrapped), or start "
                "the child by spawn.");
  }

  const Pointer& pointer() const { return pointer_; }
  auto& operator*() const { return *pointer_; }
  auto* operator->() const { return pointer_.get(); }

 private:
  const int process_ = getpid();
  Pointer pointer_;
};

}  // namespace bagua
