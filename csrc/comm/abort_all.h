// Ends several communicators at once.
#pragma once

#include <memory>
#include <string>
#include <system_error>
#include <thread>
#include <vector>

#include "comm/communicator.h"

namespace bagua {

// Aborts all of them at the same time. On a device an abort waits for the communicator's stream,
// where kernels may be queued behind one of another communicator that ends with its abort only: one
// after the other, the first would wait for ever.
template <typename Pointer>
void abort_all(const std::vector<Pointer>& communicators, const std::string& reason) noexcept {
  std::vector<std::thread> threads;
  for (size_t i = 0; i < communicators.size(); ++i) {
    Communicator& communicator = *communicators[i];
    if (i + 1 == communicators.size()) {
      communicator.abort(reason);
      continue;
    }
    try {
      threads.emplace_back([&communicator, &reason] { communicator.abort(reason); });
    } catch (const std::system_error&) {  // no more threads
      communicator.abort(reason);
    }
  }
  for (std::thread& thread : threads) thread.join();
}

}  // namespace bagua
