// Where ranks tell each other why they stopped and where they are, beside the wire that may be
// blocked.
#pragma once

#include <chrono>
#include <cstdint>
#include <functional>
#include <memory>
#include <optional>
#include <string>

#include "health/heartbeat.h"
#include "health/store_worker.h"

namespace bagua {

// A notice board in a c10d store; the caller gives each group a store prefix of its own.
//
// Each rank writes a heartbeat twice a second, by a thread of the board's (StoreWorker): that it is
// there, and its whereabouts. Nobody reads them until something has gone wrong.
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

  // This rank failed. The first failure of the group stays; later ones change nothing.
  // is_secondary: it may be the consequence of what another rank did.
  void publish(const std::string& reason, bool is_secondary) noexcept;

  struct News {
    std::string text;  // "rank 3: reason"
    bool is_secondary;
  };
  // The group's failure, unless it is this rank's own.
  std::optional<News> poll() noexcept;

  // This rank leaves without a failure after so many rounds. Counts once.
  void leave(int64_t rounds) noexcept;

  // A rank that left after fewer rounds than `round`: "rank 1 left after 7 rounds".
  std::optional<std::string> poll_left(int64_t round) noexcept;

  // From now on heartbeats say what `where` returns; it is called by the worker's thread, must not
  // block, and returns nothing once there is no more to tell, which ends them.
  void beat(std::function<std::optional<Whereabouts>()> where);

  // The same with state->whereabouts(), as long as somebody else holds the state.
  template <typename State>
  void beat_while_alive(const std::shared_ptr<State>& state) {
    beat([weak = std::weak_ptr<State>(state)] {
      const auto alive = weak.lock();
      return alive ? std::optional(alive->whereabouts()) : std::nullopt;
    });
  }

  // Publishes the position last passed to note(); the first call starts publishing.
  void note(Whereabouts here);

  // All heartbeats as they are now; null if the store does not answer.
  std::shared_ptr<const Snapshot> look() noexcept;

  // Looks twice, more than a heartbeat apart, and says in words who is silent, behind or ahead of
  // this rank, which is in `round`; also that nobody is, or that the store is silent. `unit`: what
  // is counted. `everyone`: say also where the others are.
  std::string survey(int64_t round, const std::string& unit = "round",
                     bool everyone = false) noexcept;

  // The same, a sentence per rank. `observer.rank` is not looked at.
  OtherRanks others(Observer observer) noexcept;

  // Text of survey() for two looks.
  std::string compare(const std::shared_ptr<const Snapshot>& before,
                      const std::shared_ptr<const Snapshot>& after, int64_t round,
                      const std::string& unit = "round", bool everyone = false) const;

 private:
  struct Noted;
  OtherRanks found(const std::shared_ptr<const Snapshot>& before,
                   const std::shared_ptr<const Snapshot>& after, Observer observer) const;

  const int rank_;
  const int size_;
  StoreWorker worker_;
  const std::shared_ptr<Noted> noted_;
};

// Two looks must be further apart than this: two heartbeats, and what a busy machine takes.
inline constexpr std::chrono::milliseconds kBetweenLooks(1300);

}  // namespace bagua
