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
inline void abort_all(const std::vector<std::shared_ptr<Communicator>>& communicators,
                      const std::string& reason) noexcept {
  std::vector<std::thread> threads;
  for (const auto& communicator : communicators) {
    try {
      threads.emplace_back([&] { communicator->abort(reason); });
    } catch (const std::system_error&) {  // no more threads
      communicator->abort(reason);
    }
  }
  for (std::thread& thread : threads) thread.join();
}

}  // namespace bagua
