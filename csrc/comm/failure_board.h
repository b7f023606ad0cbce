// Where ranks tell each other why they stopped, beside the wire that may be blocked.
#pragma once

#include <cstdint>
#include <mutex>
#include <optional>
#include <string>

#include <c10/util/intrusive_ptr.h>

namespace c10d {
class Store;
}

namespace bagua {

// A notice board in a c10d store; the caller gives each group a store prefix of its own.
//
// Thread safety: all methods. Ownership: a clone of the store (a connection of its own where the
// store can make one), so that a blocked user of the original does not block the board. May fail:
// never; once the store does not answer, nothing is found any more and nothing is published.
// Cost: one question to the store per poll while there is nothing to tell.
class FailureBoard final {
 public:
  FailureBoard(const c10::intrusive_ptr<c10d::Store>& store, int rank, int size);
  ~FailureBoard();
  FailureBoard(const FailureBoard&) = delete;
  FailureBoard& operator=(const FailureBoard&) = delete;

  // This rank failed. The first failure of the group stays; later ones change nothing.
  void publish(const std::string& reason) noexcept;

  // The group's failure, "rank 3: reason", unless it is this rank's own.
  std::optional<std::string> poll() noexcept;

  // This rank leaves without a failure after so many rounds. Counts once.
  void leave(int64_t rounds) noexcept;

  // A rank that left after fewer rounds than `round`: "rank 1 left after 7 rounds".
  std::optional<std::string> poll_left(int64_t round) noexcept;

 private:
  std::optional<std::string> read(const char* key);
  void append(const char* key, const std::string& entry);
  template <typename Question>
  void ask(Question question) noexcept;

  const int rank_;
  const int size_;
  std::mutex mutex_;  // of all below
  c10::intrusive_ptr<c10d::Store> store_;
  bool reachable_ = true;
  bool left_ = false;
};

}  // namespace bagua
