// Failures and positions of ranks, published in the store: the wire itself may be blocked.
#pragma once

#include <atomic>
#include <chrono>
#include <cstdint>
#include <functional>
#include <memory>
#include <optional>
#include <string>

#include "health/failure.h"
#include "health/heartbeat.h"
#include "health/store_worker.h"

namespace bagua {

// Time between two heartbeats, and between two looks at the news while a rank waits: a step that is
// merely slow must not load the store.
inline constexpr std::chrono::milliseconds kBetweenNews(500);
// Minimum time between two snapshots, of which a lost rank has the same heartbeat in both: two
// heartbeats and the delay of a busy machine.
inline constexpr std::chrono::milliseconds kBetweenLooks(1300);
// Time for a store that does not answer.
inline constexpr std::chrono::milliseconds kPatience(2000);

// A notice board in a c10d store; the caller gives each group a store prefix of its own.
//
// Each rank writes a heartbeat with its position every kBetweenNews, by a thread of the board
// (StoreWorker). Heartbeats of others are read only after a failure; failures and exits by each
// poll.
//
// Thread safety: all methods. Ownership: a clone of the store, so that a blocked user of the
// original does not block the board. May fail: never, and no call takes more than a few seconds;
// once the store does not answer, nothing is found any more and nothing is published.
// Cost: one write per heartbeat, on the worker's thread; one question to the store per poll.
class FailureBoard final {
 public:
  FailureBoard(const c10::intrusive_ptr<c10d::Store>& store, int rank, int size);
  FailureBoard(const FailureBoard&) = delete;
  FailureBoard& operator=(const FailureBoard&) = delete;

  // This rank failed. The first failure of the group stays; later ones change nothing. kThisRank
  // counts as kMaybeOther after this rank has been told of a failure or an exit. The reason of
  // kAllRanks names no rank of its own: each rank says it as its own error.
  void publish(const std::string& reason, Blame blame) noexcept;

  struct News {
    std::string text;  // "rank 3: reason"; of kAllRanks the reason
    Blame blame;
  };
  // The group's failure, unless it is this rank's own.
  std::optional<News> poll() noexcept;

  // This rank exits without a failure after `rounds` rounds. Only the first call counts.
  void publish_exit(int64_t rounds) noexcept;

  // A rank that exited after fewer rounds than `round`: "rank 1 exited after 7 rounds".
  std::optional<std::string> poll_exit(int64_t round) noexcept;

  // The news that ends a wait in `round`: poll(), else poll_exit() as news of the rank that exited.
  std::optional<News> news(int64_t round) noexcept;

  // Publishes what `where` returns as heartbeats from now on, the first at once; a later call
  // replaces `where`. The worker's thread calls it; it must not block. There is no heartbeat when
  // it returns nothing. `on_news`, if there is one, is called on the same thread after a heartbeat
  // of a rank that waits for others, if news() would find something; it must not ask the board.
  using OnNews = std::function<void(const News&)>;
  void beat(std::function<std::optional<Whereabouts>()> where, OnNews on_news = nullptr);

  // The current heartbeats; null if the store does not answer.
  std::shared_ptr<const Snapshot> look() noexcept;

  // The ranks that are silent, behind or ahead of this rank, which is at `here`, by two looks more
  // than a heartbeat apart; or that there are none, or that the store is silent.
  OtherRanks compare(const std::shared_ptr<const Snapshot>& before,
                     const std::shared_ptr<const Snapshot>& after, const Position& here) const;

  // Looks twice, and compares.
  OtherRanks others(const Position& here) noexcept;

 private:
  // Shared with the worker's thread, which may outlive the board.
  struct Shared {
    std::atomic<bool> told{false};  // poll(), poll_exit(), news() or `on_news` had something
    std::atomic<int64_t> beats{0};
  };
  // Asks the store, and notes that the board has told something if there is an answer. Empty if
  // the store does not answer, or has nothing.
  template <typename Found>
  std::optional<Found> found(std::function<std::optional<Found>(c10d::Store&)> question) noexcept;

  const int rank_;
  const int size_;
  const std::shared_ptr<Shared> shared_;
  StoreWorker worker_;
};

// The error for a rank to raise after the board has told it of a failure. `whoami`: that rank and
// its position, with which the message begins.
std::exception_ptr error_of(const FailureBoard::News& news, const std::string& whoami);

}  // namespace bagua
