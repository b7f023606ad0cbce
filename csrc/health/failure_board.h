// Failures, exits and positions of the users of a seat, in the store: the wire may be blocked.
#pragma once

#include <atomic>
#include <cstdint>
#include <functional>
#include <memory>
#include <mutex>
#include <optional>
#include <string>
#include <vector>

#include "health/board.h"
#include "health/failure.h"
#include "health/heartbeat.h"

namespace bagua {

// How a seat at a group's board is kept: Note [Seats].
struct SeatOptions {
  std::string name;          // short, without spaces; equal on all members
  std::string title;         // Seat::title
  std::string unit;          // Seat::unit
  std::vector<int> members;  // by their rank in the group; this rank is one of them
  bool per_round = false;    // a failure counts in the round alone in which it was published
};

// A rank's seat at the board of its group. Failures and exits are kept under the name of the seat
// and are read by each poll; heartbeats of others are read only after a failure.
//
// Keys: "<seat>/failed", "<seat>/exits", "<seat>/exited", which the last of the members to exit
// deletes; of a board for one seat without the name.
// Thread safety: all methods. Ownership: shares the board. May fail: never, and no call takes more
// than a few seconds; while the store does not answer, nothing is found, and what is published is
// written when it answers again.
class FailureBoard final {
 public:
  // The only seat of a board for `size` ranks.
  FailureBoard(const c10::intrusive_ptr<c10d::Store>& store, int rank, int size);
  FailureBoard(std::shared_ptr<Board> board, SeatOptions options);
  ~FailureBoard();
  FailureBoard(const FailureBoard&) = delete;
  FailureBoard& operator=(const FailureBoard&) = delete;

  // This rank failed. The first failure of the group stays; later ones change nothing. kThisRank
  // counts as kMaybeOther after this rank has been told of a failure or an exit. The reason of
  // kAllRanks names no rank of its own: each rank says it as its own error.
  void publish(const std::string& reason, Blame blame) noexcept;

  using News = bagua::News;
  // The group's failure, unless it is this rank's own.
  std::optional<News> poll() noexcept;

  // This rank exits without a failure after `rounds` rounds. Only the first call counts.
  void publish_exit(int64_t rounds) noexcept;

  // A rank that exited after fewer rounds than `round`: "rank 1 exited after 7 rounds".
  std::optional<std::string> poll_exit(int64_t round) noexcept;

  // The news that ends a wait in `round`: poll(), else poll_exit() as news of the rank that exited.
  std::optional<News> news(int64_t round) noexcept;

  // Publishes what `where` returns with the heartbeats from now on; a later call replaces `where`.
  // Threads of the board call it; it must not block. There is no position when it returns nothing.
  // `on_news`, if there is one, is called on a thread of the board while this rank waits for
  // others, if news() would find something, and `on_never` with the reason for which a wait that is
  // watched cannot end. Neither may ask the board.
  using OnNews = std::function<void(const News&)>;
  void beat(std::function<std::optional<Whereabouts>()> where, OnNews on_news = nullptr,
            Watched watched = Watched::kNo,
            std::function<void(const std::string&)> on_never = nullptr);

  // The current heartbeats; null if the store does not answer.
  std::shared_ptr<const Snapshot> look() noexcept;

  // The ranks that are silent, behind or ahead of this rank, which is at `here`, by two looks more
  // than a heartbeat apart; or that there are none, or that the store is silent.
  OtherRanks compare(const std::shared_ptr<const Snapshot>& before,
                     const std::shared_ptr<const Snapshot>& after, const Position& here) const;

  // Looks twice, and compares.
  OtherRanks others(const Position& here) noexcept;

 private:
  struct Shared;
  // Asks the store, and notes that the board has told something if there is an answer. Empty if
  // the store does not answer, or has nothing.
  template <typename Found>
  std::optional<Found> found(std::function<std::optional<Found>(c10d::Store&)> question) noexcept;

  const std::shared_ptr<Board> board_;
  const std::shared_ptr<Shared> shared_;  // with the threads of the board
};

// The error for a rank to raise after the board has told it of a failure. `whoami`: that rank and
// its position, with which the message begins.
std::exception_ptr error_of(const FailureBoard::News& news, const std::string& whoami);

}  // namespace bagua
