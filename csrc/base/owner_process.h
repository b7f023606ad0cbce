// The process that an object belongs to: a forked child has a copy, but no threads or peers of it.
#pragma once

#include <string>

#include <unistd.h>

#include "base/check.h"

namespace bagua {

// Throws in a process forked from `process`, before anything is touched that both have.
inline void check_owner(int process, const char* what) {
  const int here = getpid();
  BAGUA_CHECK(here == process, what, " belongs to process ", process, ", of which this one, ", here,
              ", was forked: a child cannot communicate in its parent's place. In the child use a "
              "copy of the module (copy.deepcopy() gives one that is not wrapped), or start the "
              "child by spawn.");
}

}  // namespace bagua
