// Waits that Ctrl-C ends.
#pragma once

#include <functional>

namespace bagua {

// Note [Signals]
// Python runs signal handlers, and raises KeyboardInterrupt, on its main thread only, when that
// executes bytecode or asks for signals. A wait in C++ does neither, and gloo, a store or a
// rendezvous cannot be woken. So the main thread hands such a call to another thread, and looks
// for signals ten times a second until it is done; a wait on a condition variable of ours looks for
// them between its slices. What a handler raises ends the wait at once.

// Runs `work`, from the main thread on another thread, elsewhere here; returns or throws as it
// does. If a signal handler raises meanwhile, that is thrown as py::error_already_set, and `work`
// is left to itself: it must own all that it uses. The caller may hold the GIL or not; `work` does
// not. On a device's current stream `work` cannot rely.
void run_interruptibly(const std::function<void()>& work);

// Throws what a signal handler raises as py::error_already_set; on the main thread only, elsewhere
// it does nothing.
void check_signals();

}  // namespace bagua
