#include "health/failure_board.h"

#include <memory>
#include <sstream>
#include <string_view>
#include <thread>
#include <utility>

#include <torch/csrc/distributed/c10d/Store.hpp>

#include "base/check.h"
#include "health/sanitize.h"
#include "health/store_is_silent.h"
#include "health/verdict.h"

namespace bagua {
namespace {

constexpr char kCause = '!', kSecondary = '?', kAlike = '=';  // kinds of failures
constexpr char kRound = '@';  // of a failure that counts in one round: "!@7 3: reason"

// get() would wait for a key that is not there.
std::optional<std::string> read(c10d::Store& store, const std::string& key) {
  if (!store.check({key})) return std::nullopt;
  return store.get_to_str(key);
}

void append(c10d::Store& store, int size, const std::string& key, const std::string& entry) {
  if (store.hasExtendedApi()) return store.append(key, {entry.begin(), entry.end()});
  // Each lost race means that another rank has appended: at most size - 1 times.
  std::string expected = read(store, key).value_or("");
  for (int attempt = 0; attempt < size; ++attempt) {
    const std::string now = store.compareSet(key, expected, expected + entry);
    if (now == expected + entry) return;
    expected = now;
  }
}

// The round in which the entry of a failure counts; 0: in all.
int64_t round_of(const std::string& text) {
  if (text.size() < 2 || text[1] != kRound) return 0;
  std::istringstream stream(text.substr(2));
  int64_t round = 0;
  stream >> round;
  return round;
}

char kind_of(Blame blame, bool told) {
  if (blame == Blame::kAllRanks) return kAlike;
  return blame == Blame::kMaybeOther || told ? kSecondary : kCause;
}

// One rank of a group, in a round.
struct Member {
  int rank;
  int size;
  int64_t round;
};

// News for the member in the entry of the first rank that failed.
std::optional<News> news_of(const std::optional<std::string>& text, const Member& member) {
  if (!text || text->empty()) return std::nullopt;
  const int64_t round = round_of(*text);
  if (round != 0 && round != member.round) return std::nullopt;
  size_t begin = 1;
  if (round != 0) begin = std::min(text->find(' '), text->size() - 1) + 1;
  const std::string entry = sanitize_untrusted(std::string_view(*text).substr(begin));
  if (entry.starts_with(concat(member.rank, ": "))) return std::nullopt;
  const char kind = text->front();
  if (kind == kAlike) {
    const size_t colon = entry.find(": ");
    return News{.text = colon == std::string::npos ? entry : entry.substr(colon + 2),
                .blame = Blame::kAllRanks};
  }
  return News{.text = "rank " + entry,
              .blame = kind == kSecondary ? Blame::kMaybeOther : Blame::kThisRank};
}

// The first other rank that exited before the member's round was done.
std::optional<std::string> exited_before(const std::optional<std::string>& text,
                                         const Member& member) {
  std::istringstream entries(text.value_or(""));
  int rank;
  int64_t rounds;
  while (entries >> rank >> rounds) {
    if (rank >= 0 && rank < member.size && rank != member.rank && rounds < member.round) {
      return concat("rank ", rank, " exited after ", rounds, " rounds");
    }
  }
  return std::nullopt;
}

std::optional<News> first_news(const std::optional<std::string>& failed,
                               const std::optional<std::string>& exits, const Member& member) {
  if (auto news = news_of(failed, member)) return news;
  const auto exited = exited_before(exits, member);
  if (!exited) return std::nullopt;
  return News{.text = *exited, .blame = Blame::kThisRank};
}

std::vector<int> all_ranks(int size) {
  std::vector<int> ranks;
  for (int rank = 0; rank < size; ++rank) ranks.push_back(rank);
  return ranks;
}

int place_of(const std::vector<int>& members, int rank) {
  for (size_t i = 0; i < members.size(); ++i) {
    if (members[i] == rank) return static_cast<int>(i);
  }
  BAGUA_CHECK_ARG(false, "rank ", rank, " is not one of the ", members.size(), " members");
}

}  // namespace

struct FailureBoard::Shared {
  explicit Shared(SeatOptions from, int own)
      : options(std::move(from)),
        rank(place_of(options.members, own)),
        prefix(options.name.empty() ? "" : options.name + "/") {}

  const SeatOptions options;
  const int rank;  // among the members
  const std::string prefix;
  std::atomic<bool> told{false};  // poll(), poll_exit(), news() or `on_news` had something
  std::atomic<bool> left{false};
  std::mutex mutex;
  std::function<std::optional<Whereabouts>()> where;  // under the mutex
  // The thread that looks at the news has these: all that there was at publication `count`.
  int64_t count = 0;
  std::optional<std::string> failed_then, exits_then;

  int size() const { return static_cast<int>(options.members.size()); }
  Looker looker() const { return {.seat = options.name, .members = options.members, .rank = rank}; }
  Member member(int64_t round) const { return {.rank = rank, .size = size(), .round = round}; }
  std::string failed() const { return prefix + "failed"; }  // "!3: reason" of the first rank
  std::string exits() const { return prefix + "exits"; }    // "0 12 3 7 ": ranks and their rounds
  std::string exited() const { return prefix + "exited"; }  // how many

  std::optional<Whereabouts> here() {
    std::function<std::optional<Whereabouts>()> ask;
    {
      const std::lock_guard lock(mutex);
      ask = where;
    }
    return ask ? ask() : std::nullopt;
  }

  // The round of a seat whose failures count in one round; else 0.
  int64_t round() {
    if (!options.per_round) return 0;
    const auto now = here();
    return now ? now->round : 0;
  }

  std::optional<News> look(c10d::Store& store, int64_t published, const Whereabouts& now) {
    if (published != count) {
      failed_then = read(store, failed());
      exits_then = read(store, exits());
      count = published;
    }
    const auto news = first_news(failed_then, exits_then, member(now.round));
    if (news) told = true;
    return news;
  }

  void write_failure(c10d::Store& store, const std::string& entry, int64_t in_round) {
    std::string expected;
    for (int attempt = 0; attempt < size(); ++attempt) {
      const std::string now = store.compareSet(failed(), expected, entry);
      if (now == entry || in_round == 0 || round_of(now) >= in_round) return;
      expected = now;
    }
  }

  void write_exit(c10d::Store& store, int64_t rounds) {
    append(store, size(), exits(), concat(rank, " ", rounds, " "));
    if (!prefix.empty() && store.add(exited(), 1) >= size()) {
      for (const std::string& key : {exits(), exited()}) store.deleteKey(key);
    }
  }
};

FailureBoard::FailureBoard(const c10::intrusive_ptr<c10d::Store>& store, int rank, int size)
    : FailureBoard(std::make_shared<Board>(store, rank, size),
                   {.name = "", .title = "", .unit = "round", .members = all_ranks(size)}) {}

FailureBoard::FailureBoard(std::shared_ptr<Board> board, SeatOptions options)
    : board_(std::move(board)),
      shared_(std::make_shared<Shared>(std::move(options), board_->rank())) {}

FailureBoard::~FailureBoard() { board_->remove(shared_->options.name); }

void FailureBoard::publish(const std::string& reason, Blame blame) noexcept {
  const int64_t round = shared_->round();
  const std::string in_round = round == 0 ? "" : concat(kRound, round, " ");
  const std::string entry =
      concat(kind_of(blame, shared_->told), in_round, shared_->rank, ": ", reason);
  board_->mark_failed(shared_->options.name, true);
  board_->ask([shared = shared_, beat = board_->beat_now(), entry, round](c10d::Store& store) {
    shared->write_failure(store, entry, round);
    beat(store);
    Board::count_news(store);
  });
}

template <typename Found>
std::optional<Found> FailureBoard::found(
    std::function<std::optional<Found>(c10d::Store&)> question) noexcept {
  auto answer = std::make_shared<std::optional<Found>>();
  const bool answered = board_->ask(
      [answer, question = std::move(question)](c10d::Store& store) { *answer = question(store); });
  if (!answered || !*answer) return std::nullopt;
  shared_->told = true;
  return *answer;
}

std::optional<News> FailureBoard::poll() noexcept {
  const Member me = shared_->member(shared_->round());
  return found<News>(
      [me, key = shared_->failed()](c10d::Store& store) { return news_of(read(store, key), me); });
}

void FailureBoard::publish_exit(int64_t rounds) noexcept {
  if (shared_->left.exchange(true)) return;
  board_->ask([shared = shared_, rounds](c10d::Store& store) {
    shared->write_exit(store, rounds);
    Board::count_news(store);
  });
}

std::optional<std::string> FailureBoard::poll_exit(int64_t round) noexcept {
  return found<std::string>(
      [me = shared_->member(round), key = shared_->exits()](c10d::Store& store) {
        return exited_before(read(store, key), me);
      });
}

std::optional<News> FailureBoard::news(int64_t round) noexcept {
  return found<News>([me = shared_->member(round), failed = shared_->failed(),
                      exits = shared_->exits()](c10d::Store& store) {
    return first_news(read(store, failed), read(store, exits), me);
  });
}

void FailureBoard::beat(std::function<std::optional<Whereabouts>()> where, OnNews on_news,
                        Watched watched, std::function<void(const std::string&)> on_never) {
  const SeatOptions& options = shared_->options;
  const int64_t before = shared_->round();
  {
    const std::lock_guard lock(shared_->mutex);
    shared_->where = where;
  }
  if (options.per_round && shared_->round() != before) {
    shared_->told = false;
    board_->mark_failed(options.name, false);
  }
  board_->place(std::make_shared<const Seat>(
      Seat{.title = options.title,
           .unit = options.unit,
           .looker = shared_->looker(),
           .where = std::move(where),
           .on_news = std::move(on_news),
           .on_never = std::move(on_never),
           .read = [shared = shared_](
                       c10d::Store& store, int64_t count,
                       const Whereabouts& here) { return shared->look(store, count, here); },
           .watched = watched}));
}

std::shared_ptr<const Snapshot> FailureBoard::look() noexcept { return board_->look(); }

OtherRanks FailureBoard::others(const Position& here) noexcept {
  Verdict verdict;
  if (board_->size() > kMostLooking) verdict = await_verdict(*board_);
  if (verdict.silent) {
    OtherRanks silent = where_silent_are(*verdict.silent, shared_->looker(), here);
    if (!silent.causes.empty()) return silent;
  }
  const auto before = look();
  if (before) std::this_thread::sleep_for(kBetweenLooks);
  const auto after = before ? look() : nullptr;
  if (verdict.for_all) write_verdict(*board_, before, after);
  return compare(before, after, here);
}

OtherRanks FailureBoard::compare(const std::shared_ptr<const Snapshot>& before,
                                 const std::shared_ptr<const Snapshot>& after,
                                 const Position& here) const {
  const Looker me = shared_->looker();
  if (before && after) return where_others_are(*before, *after, me, here);
  std::vector<std::string> lost;
  if (before) lost = lost_paths(*before, me);
  const std::string own = board_->unreached();
  if (lost.empty() && !own.empty()) lost = {lost_path(me.rank, own)};
  return {.causes = std::move(lost),
          .present = {},
          .failed = {},
          .nobody = kStoreIsSilent,
          .store_is_silent = true};
}

std::exception_ptr error_of(const FailureBoard::News& news, const std::string& whoami) {
  const std::string message = concat(whoami, ": ", news.text);
  switch (news.blame) {
    case Blame::kMaybeOther:
      return std::make_exception_ptr(TransportError(message));
    case Blame::kAllRanks:
      return std::make_exception_ptr(MismatchError(message));
    default:
      return std::make_exception_ptr(Error(message));
  }
}

}  // namespace bagua
