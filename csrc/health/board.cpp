#include "health/board.h"

#include <algorithm>
#include <cstdio>
#include <map>
#include <mutex>
#include <utility>

#include <torch/csrc/distributed/c10d/Store.hpp>

#include "base/check.h"
#include "base/drop.h"
#include "base/own_sockets.h"
#include "health/store_is_silent.h"
#include "health/verdict.h"

namespace bagua {
namespace {

using std::chrono::milliseconds;

constexpr const char* kNewsKey = "news";
// Added to the count of news for each rank that has left: more than there are publications.
constexpr int64_t kOneLeft = int64_t{1} << 40;
// Time between two looks at the news: beside heartbeats, fewer than two requests a second.
constexpr milliseconds kBetweenQuestions(600);
// Positions of seats that have failed and are gone, the last ones.
constexpr size_t kMostFailed = 8;
// More patience for an answer with the heartbeats of all ranks, for which all may ask at a time.
constexpr milliseconds kPatiencePerRank(10);
// A wait that cannot end is looked for after so long where no wait is reported.
constexpr milliseconds kFirstLook(10000);

// A transport that has failed has closed its sockets: what they told is repeated for so long.
constexpr milliseconds kTold(10000);

// Puts one request, which has its own patience; false: no answer.
using Answer = std::function<bool(StoreWorker::Question)>;

// Moves those of the keys from `begin` on that are there to its front, and returns their end: each
// request asks whether all of a range are there, and is repeated for its halves if not.
// 2 * missing * log2(keys) requests. Nothing: no answer.
using Ranks = std::vector<int>;
bool find_present(const Answer& answer, const Ranks& ranks, Ranks& present) {
  if (ranks.empty()) return true;
  const auto all = std::make_shared<bool>(false);
  std::vector<std::string> keys;
  for (const int rank : ranks) keys.push_back(beat_key(rank));
  if (!answer([all, keys](c10d::Store& store) { *all = store.check(keys); })) return false;
  if (*all) {
    present.insert(present.end(), ranks.begin(), ranks.end());
    return true;
  }
  if (ranks.size() == 1) return true;
  const auto middle = ranks.begin() + static_cast<int64_t>(ranks.size() / 2);
  return find_present(answer, {ranks.begin(), middle}, present) &&
         find_present(answer, {middle, ranks.end()}, present);
}

int64_t steady_now() {
  return std::chrono::steady_clock::now().time_since_epoch() / milliseconds(1);
}

std::string seconds(milliseconds time) {
  char text[32];
  std::snprintf(text, sizeof text, "%.1f s", std::chrono::duration<double>(time).count());
  return text;
}

}  // namespace

// Shared with the threads, which may outlive the board.
struct Board::State {
  // A wait at a seat, for the thread that asks.
  struct Wait {
    int64_t round = -1;
    std::string text{};     // Whereabouts::text: another one is another wait
    milliseconds since{0};  // on the clock
    milliseconds next{0};   // how long it has lasted when it is looked at next
    std::shared_ptr<const Snapshot> before{};
    milliseconds looked{0};
  };

  State(int own_rank, int ranks, StragglerReports to)
      : rank(own_rank), size(ranks), reports(std::move(to)) {}

  const int rank;
  const int size;
  const StragglerReports reports;

  mutable std::mutex mutex;  // of the next seven
  std::vector<std::shared_ptr<const Seat>> seats;
  std::vector<SeatPosition> failed;  // where seats failed, which may be gone
  bool named = false;                // seats are those of a group: its heartbeats go on without any
  bool exited = false;
  std::vector<char> known;  // by rank, whether it has ever beaten
  std::string unreached;    // addresses
  int64_t unreached_at = 0;

  std::mutex writing;  // one heartbeat after the other
  int64_t number = 0;
  bool silent = false;  // the last heartbeat is written

  std::map<std::string, Wait> waits;        // of the thread that asks
  std::map<std::string, Wait> muted_waits;  // of the thread that beats
  std::atomic<int64_t> asking_since{0};     // milliseconds of steady_now(); 0: asks nothing

  Heartbeat positions();
  void look_at_paths();
  std::string lost_paths() const;
  SeatPosition position(const Seat& seat, const Whereabouts& here) const;
  void beat(c10d::Store& store);
  // Writes the last heartbeat, and counts it; nobody reads the keys of a group without ranks.
  // `count`: 0, or how much the group had published then.
  void leave(c10d::Store& store, int64_t& count, bool process_ends);
  std::shared_ptr<const Snapshot> look(const Answer& answer);
  void watch(c10d::Store& store);
  void tell_silence();
  Wait& wait_of(std::map<std::string, Wait>& known, const Seat& seat,
                const Whereabouts& here) const;
  // The question, which notes that it is under way.
  static StoreWorker::Question noted(std::shared_ptr<State> state, StoreWorker::Question question);
  void watch(c10d::Store& store, const Seat& seat, const Whereabouts& here);
  void report(const Seat& seat, const Whereabouts& here, const Wait& wait, const std::string& what);
};

StoreWorker::Question Board::State::noted(std::shared_ptr<State> state,
                                          StoreWorker::Question question) {
  return [state = std::move(state), question = std::move(question)](c10d::Store& store) {
    struct Note {
      explicit Note(std::atomic<int64_t>& of) : since(of) { since = steady_now(); }
      ~Note() { since = 0; }
      std::atomic<int64_t>& since;
    } const note(state->asking_since);
    question(store);
  };
}

SeatPosition Board::State::position(const Seat& seat, const Whereabouts& here) const {
  const std::string head =
      seat.title.empty() ? "" : concat(seat.unit, " ", here.round, " of ", seat.title);
  return {.seat = seat.looker.seat, .head = head, .where = here};
}

void Board::State::look_at_paths() {
  std::string found;
  for (const std::string& address : unreached_addresses()) {
    found += (found.empty() ? "" : ", ") + address;
  }
  if (found.empty()) return;
  const std::lock_guard lock(mutex);
  unreached = std::move(found);
  unreached_at = steady_now();
}

std::string Board::State::lost_paths() const {
  const std::lock_guard lock(mutex);
  return steady_now() - unreached_at < kTold.count() ? unreached : "";
}

Heartbeat Board::State::positions() {
  std::vector<std::shared_ptr<const Seat>> now;
  std::vector<SeatPosition> have_failed;
  Heartbeat beat;
  {
    const std::lock_guard lock(mutex);
    now = seats;
    have_failed = failed;
    beat.exited = exited;
  }
  for (const auto& seat : now) {
    if (const auto here = seat->where ? seat->where() : std::nullopt) {
      beat.positions.push_back(position(*seat, *here));
    }
  }
  drop(std::move(now));
  for (SeatPosition& one : have_failed) {
    const auto same = std::find_if(beat.positions.begin(), beat.positions.end(),
                                   [&](const auto& other) { return other.seat == one.seat; });
    if (same == beat.positions.end()) {
      beat.positions.push_back(std::move(one));
    } else {
      same->failed = true;
    }
  }
  return beat;
}

void Board::State::beat(c10d::Store& store) {
  const std::lock_guard lock(writing);
  if (silent) return;
  Heartbeat now = positions();
  const auto waits = [](const SeatPosition& one) { return one.where.waits; };
  if (std::any_of(now.positions.begin(), now.positions.end(), waits)) look_at_paths();
  now.unreached = lost_paths();
  if (now.positions.empty() && !now.exited && !named) return;
  now.number = ++number;
  store.set(beat_key(rank), heartbeat_text(now));
}

void Board::State::leave(c10d::Store& store, int64_t& count, bool process_ends) {
  beat(store);
  {
    const std::lock_guard lock(writing);
    silent = true;
  }
  if (count == 0) count = store.add(kNewsKey, 1 + kOneLeft);
  if (count / kOneLeft != size || process_ends) return;
  store.deleteKey(kNewsKey);
  store.deleteKey(kVerdictKey);
  for (int other = 0; other < size; ++other) store.deleteKey(beat_key(other));
}

// 1. Which ranks have ever beaten, 2. all of their heartbeats.
std::shared_ptr<const Snapshot> Board::State::look(const Answer& answer) {
  Ranks present, unknown;
  {
    const std::lock_guard lock(mutex);
    for (int other = 0; other < size; ++other) {
      (known[other] ? present : unknown).push_back(other);
    }
  }
  if (!find_present(answer, unknown, present)) return nullptr;
  const auto found = std::make_shared<Snapshot>();
  found->beats.resize(size);
  const bool answered = present.empty() || answer([found, present](c10d::Store& store) {
                          std::vector<std::string> keys;
                          for (const int other : present) keys.push_back(beat_key(other));
                          const std::vector<std::vector<uint8_t>> texts = store.multiGet(keys);
                          for (size_t i = 0; i < std::min(present.size(), texts.size()); ++i) {
                            const auto* text = reinterpret_cast<const char*>(texts[i].data());
                            found->beats[present[i]] = parse_heartbeat({text, texts[i].size()});
                          }
                        });
  const std::lock_guard lock(mutex);
  for (const int other : present) known[other] = 1;
  return answered ? found : nullptr;
}

void Board::State::watch(c10d::Store& store) {
  std::vector<std::shared_ptr<const Seat>> now;
  {
    const std::lock_guard lock(mutex);
    now = seats;
  }
  std::optional<int64_t> count;
  for (const auto& seat : now) {
    if (!seat->on_news && seat->watched == Watched::kNo) continue;
    const std::optional<Whereabouts> here = seat->where ? seat->where() : std::nullopt;
    if (!here || !here->waits) {
      waits.erase(seat->looker.seat);
      continue;
    }
    if (seat->on_news) {
      if (!count) count = store.add(kNewsKey, 0);
      if (const auto news = seat->read(store, *count, *here)) seat->on_news(*news);
    }
    if (seat->watched == Watched::kYes) watch(store, *seat, *here);
  }
  drop(std::move(now));
}

// 1. A first look once the time is up. 2. A second one more than a heartbeat later, and the report.
// 3. The same when twice the time is up.
void Board::State::watch(c10d::Store& store, const Seat& seat, const Whereabouts& here) {
  const milliseconds now = reports.clock->now();
  Wait& wait = wait_of(waits, seat, here);
  if (now - wait.since < wait.next) return;
  const Answer answer = [&](const StoreWorker::Question& question) {
    question(store);
    return true;
  };
  if (!wait.before) {
    wait.before = look(answer);
    wait.looked = now;
    return;
  }
  if (now - wait.looked < kBetweenLooks) return;
  const auto after = look(answer);
  const Position position{.number = here.round,
                          .unit = seat.title.empty() ? "" : seat.unit,
                          .everyone = seat.unit != "round"};
  report(seat, here, wait, in_words(where_others_are(*wait.before, *after, seat.looker, position)));
  if (seat.on_never) {
    const auto reason = never_comes(*wait.before, *after, seat.looker, positions());
    if (reason) seat.on_never(*reason);
  }
  wait.before = nullptr;
  wait.next *= 2;
}

// The thread that asks cannot speak while the store does not answer it. This one only sends.
void Board::State::tell_silence() {
  const int64_t since = asking_since;
  const bool silent = since != 0 && steady_now() - since > kPatience.count();
  std::vector<std::shared_ptr<const Seat>> now;
  {
    const std::lock_guard lock(mutex);
    now = seats;
  }
  for (const auto& seat : now) {
    if (seat->watched == Watched::kNo || reports.after.count() == 0) continue;
    const std::optional<Whereabouts> here = seat->where ? seat->where() : std::nullopt;
    if (!here || !here->waits) {
      muted_waits.erase(seat->looker.seat);
      continue;
    }
    Wait& wait = wait_of(muted_waits, *seat, *here);
    if (!silent || reports.clock->now() - wait.since < wait.next) continue;
    report(*seat, *here, wait, kStoreIsSilent);
    wait.next *= 2;
  }
  drop(std::move(now));
}

Board::State::Wait& Board::State::wait_of(std::map<std::string, Wait>& known, const Seat& seat,
                                          const Whereabouts& here) const {
  Wait& wait = known[seat.looker.seat];
  if (wait.round != here.round || wait.text != here.text || wait.next.count() == 0) {
    const milliseconds first = reports.after.count() > 0 ? reports.after : kFirstLook;
    wait = {.round = here.round, .text = here.text, .since = reports.clock->now(), .next = first};
  }
  return wait;
}

void Board::State::report(const Seat& seat, const Whereabouts& here, const Wait& wait,
                          const std::string& what) {
  if (!reports.report || reports.after.count() == 0) return;
  const Looker& me = seat.looker;
  const bool counted = !seat.title.empty();
  const std::string who = counted
                              ? concat(seat.title, ", rank ", me.rank, " of ", me.members.size(),
                                       ", ", seat.unit, " ", here.round)
                              : concat(here.text, ", rank ", me.rank, " of ", me.members.size());
  reports.report(concat(who, ": waiting for other ranks, has waited ",
                        seconds(reports.clock->now() - wait.since),
                        counted ? concat(" (", here.text, ")") : "", ". ", what));
}

Board::Board(const c10::intrusive_ptr<c10d::Store>& store, int rank, int size,
             StragglerReports reports)
    : state_(std::make_shared<State>(rank, size, std::move(reports))),
      beats_(store, "bagua-beats"),
      asks_(store, "bagua-asks") {
  BAGUA_CHECK_ARG(rank >= 0 && rank < size, "rank ", rank, " is outside a group of size ", size);
  state_->known.resize(size, 0);
}

Board::~Board() = default;

int Board::rank() const { return state_->rank; }
int Board::size() const { return state_->size; }

void Board::place(std::shared_ptr<const Seat> seat) {
  const bool asks = seat->on_news || seat->watched == Watched::kYes;
  {
    const std::lock_guard lock(state_->mutex);
    state_->named = state_->named || !seat->looker.seat.empty();
    auto& seats = state_->seats;
    const auto same = std::find_if(seats.begin(), seats.end(), [&](const auto& one) {
      return one->looker.seat == seat->looker.seat;
    });
    if (same == seats.end()) {
      seats.push_back(std::move(seat));
    } else {
      std::swap(*same, seat);  // the old one is dropped without the lock
    }
  }
  beats_.repeat(
      [state = state_](c10d::Store& store) {
        state->beat(store);
        state->tell_silence();
      },
      kBetweenNews);
  if (!asks) return;
  asks_.repeat(State::noted(state_, [state = state_](c10d::Store& store) { state->watch(store); }),
               kBetweenQuestions);
}

void Board::remove(const std::string& seat) noexcept {
  const std::lock_guard lock(state_->mutex);
  std::erase_if(state_->seats, [&](const auto& one) { return one->looker.seat == seat; });
}

void Board::mark_failed(const std::string& name, bool failed) noexcept {
  std::shared_ptr<const Seat> seat;
  {
    const std::lock_guard lock(state_->mutex);
    std::erase_if(state_->failed, [&](const auto& one) { return one.seat == name; });
    for (const auto& one : state_->seats) {
      if (failed && one->looker.seat == name) seat = one;
    }
  }
  const auto here = seat && seat->where ? seat->where() : std::nullopt;
  if (!here) return;
  SeatPosition position = state_->position(*seat, *here);
  position.failed = true;
  const std::lock_guard lock(state_->mutex);
  state_->failed.push_back(std::move(position));
  if (state_->failed.size() > kMostFailed) state_->failed.erase(state_->failed.begin());
}

StoreWorker::Question Board::beat_now() const {
  return [state = state_](c10d::Store& store) { state->beat(store); };
}

void Board::count_news(c10d::Store& store) { store.add(kNewsKey, 1); }

// Over the connection of earlier heartbeats, which then come before it. A question that failed is
// put once more.
void Board::leave(bool process_ends) noexcept {
  {
    const std::lock_guard lock(state_->mutex);
    if (std::exchange(state_->exited, true)) return;
  }
  const auto count = std::make_shared<int64_t>(0);
  beats_.ask([state = state_, count,
              process_ends](c10d::Store& store) { state->leave(store, *count, process_ends); },
             kPatience);
}

bool Board::ask(StoreWorker::Question question) noexcept {
  return asks_.ask(State::noted(state_, std::move(question)), kPatience);
}

std::string Board::unreached() const { return state_->lost_paths(); }

std::shared_ptr<const Snapshot> Board::look() noexcept {
  return state_->look([this](StoreWorker::Question question) {
    return asks_.ask(State::noted(state_, std::move(question)),
                     kPatience + state_->size * kPatiencePerRank);
  });
}

}  // namespace bagua
