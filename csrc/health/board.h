// The heartbeats of a group, and one rank's watch over its waits.
#pragma once

#include <atomic>
#include <chrono>
#include <cstdint>
#include <functional>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "base/clock.h"
#include "health/failure.h"
#include "health/heartbeat.h"
#include "health/store_worker.h"

namespace bagua {

// Time between two heartbeats; looks at the news while a rank waits are rarer. A step that is
// merely slow must not load the store.
inline constexpr std::chrono::milliseconds kBetweenNews(500);
// Minimum time between two snapshots, of which a lost rank has the same heartbeat in both: two
// heartbeats and the delay of a busy machine.
inline constexpr std::chrono::milliseconds kBetweenLooks(1300);
// Time for one answer of the store.
inline constexpr std::chrono::milliseconds kPatience(2000);

// When a wait is reported, and to whom.
struct StragglerReports {
  // A wait that has lasted this long is reported, and again at twice, four times ... that; 0:
  // never.
  std::chrono::milliseconds after{0};
  // Called on the waiting thread, or on one of the board's, without locks; must not throw.
  std::function<void(const std::string&)> report{};
  std::shared_ptr<Clock> clock = std::make_shared<SteadyClock>();  // of the lengths of waits
};

struct News {
  std::string text;  // "rank 3: reason"; of kAllRanks the reason
  Blame blame;
};

// Decides whether the board reports long waits at a seat.
enum class Watched : uint8_t { kNo, kYes };

// A seat, as the threads of its board see it: Note [Seats].
struct Seat {
  std::string title;  // "module 'Net'"; empty: the text of a position says all
  std::string unit;   // Position::unit
  Looker looker;
  // All are called without locks, and must not block. Null: there is no position, nobody is told.
  std::function<std::optional<Whereabouts>()> where{};
  std::function<void(const News&)> on_news{};
  std::function<void(const std::string&)> on_never{};  // why this wait cannot end
  // The news of this seat for a rank at `here`; `count`: how much the group has published.
  std::function<std::optional<News>(c10d::Store&, int64_t count, const Whereabouts& here)> read{};
  Watched watched = Watched::kNo;
};

// A rank's place at the board of its group: one heartbeat for all of its seats, one connection
// that beats, and one that asks, each with a thread that is made when it is needed.
//
// Costs: a request without an answer per heartbeat; while a seat with `on_news` waits, one answer
// more, a number, less often; a look at all heartbeats takes three round trips, whatever
// the number of ranks, once each of them has written one. Keys: "beat/<rank>", which is
// overwritten, and "news", which counts; "silent" where many have looked for a lost rank.
// Thread safety: all methods. Ownership: of two clones of the store; seats are removed before what
// they call is gone. May fail: never; what a store that does not answer leaves out is done when it
// answers again.
class Board final {
 public:
  Board(const c10::intrusive_ptr<c10d::Store>& store, int rank, int size,
        StragglerReports reports = {});
  ~Board();
  Board(const Board&) = delete;
  Board& operator=(const Board&) = delete;

  int rank() const;
  int size() const;

  // Publishes the seat's position with each heartbeat from now on, in place of that of the seat of
  // the same name.
  void place(std::shared_ptr<const Seat> seat);

  // Takes the seat away. Where it failed stays, for the ranks that look later.
  void remove(const std::string& seat) noexcept;

  // The position of the seat has failed, or has not any more; published with the next heartbeat.
  void mark_failed(const std::string& seat, bool failed) noexcept;

  // Writes a heartbeat, within a question of ask(); may outlive the board.
  StoreWorker::Question beat_now() const;

  // Counts what was published: waiting ranks look at the news of their seats.
  static void count_news(c10d::Store& store);

  // This rank exits: the last heartbeat says so. The last rank to leave deletes the group's keys,
  // unless its process ends, with which the store may: `process_ends`.
  void leave(bool process_ends = false) noexcept;

  // Puts a question, and waits for the answer for kPatience.
  bool ask(StoreWorker::Question question) noexcept;

  // Addresses that this rank does not reach, of its last wait, or empty.
  std::string unreached() const;

  // The current heartbeats; null if the store does not answer.
  std::shared_ptr<const Snapshot> look() noexcept;

 private:
  struct State;
  const std::shared_ptr<State> state_;
  StoreWorker beats_;
  StoreWorker asks_;
};

}  // namespace bagua
