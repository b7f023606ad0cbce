#include "health/failure_board.h"

#include <memory>
#include <sstream>
#include <string_view>
#include <thread>
#include <utility>

#include <torch/csrc/distributed/c10d/Store.hpp>

#include "base/check.h"
#include "health/sanitize.h"

namespace bagua {
namespace {

constexpr const char* kFailedKey = "failed";      // kind, "3: reason" of the first rank that failed
constexpr const char* kFailuresKey = "failures";  // "3 0 ": all that failed, in order
constexpr const char* kExitsKey = "exits";  // "rank rounds" of each rank that exited, "0 12 3 7 "
constexpr char kCause = '!', kSecondary = '?', kAlike = '=';  // kinds

std::string beat_key(int rank) { return concat("beat/", rank); }

// get() would wait for a key that is not there.
std::optional<std::string> read(c10d::Store& store, const std::string& key) {
  if (!store.check({key})) return std::nullopt;
  return store.get_to_str(key);
}

// Each lost race means that another rank has appended: at most size - 1 times.
void append(c10d::Store& store, int size, const char* key, const std::string& entry) {
  std::string expected = read(store, key).value_or("");
  for (int attempt = 0; attempt < size; ++attempt) {
    const std::string now = store.compareSet(key, expected, expected + entry);
    if (now == expected + entry) return;
    expected = now;
  }
}

// News for `rank` in the entry of the first rank that failed.
std::optional<FailureBoard::News> news_of(const std::optional<std::string>& text, int rank) {
  if (!text || text->empty()) return std::nullopt;
  const std::string entry = sanitize_untrusted(std::string_view(*text).substr(1));
  if (entry.starts_with(concat(rank, ": "))) return std::nullopt;
  const char kind = text->front();
  if (kind == kAlike) {
    const size_t colon = entry.find(": ");
    return FailureBoard::News{.text = colon == std::string::npos ? entry : entry.substr(colon + 2),
                              .blame = Blame::kAllRanks};
  }
  return FailureBoard::News{.text = "rank " + entry,
                            .blame = kind == kSecondary ? Blame::kMaybeOther : Blame::kThisRank};
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

std::optional<FailureBoard::News> news_in(c10d::Store& store, const Member& member) {
  if (auto failed = news_of(read(store, kFailedKey), member.rank)) return failed;
  const auto exited = exited_before(read(store, kExitsKey), member);
  if (!exited) return std::nullopt;
  return FailureBoard::News{.text = *exited, .blame = Blame::kThisRank};
}

}  // namespace

FailureBoard::FailureBoard(const c10::intrusive_ptr<c10d::Store>& store, int rank, int size)
    : rank_(rank), size_(size), shared_(std::make_shared<Shared>()), worker_(store) {
  BAGUA_CHECK_ARG(rank >= 0 && rank < size, "rank ", rank, " is outside a group of size ", size);
}

void FailureBoard::publish(const std::string& reason, Blame blame) noexcept {
  const char kind = kind_of(blame, shared_->told);
  worker_.ask(
      [rank = rank_, size = size_, reason, kind](c10d::Store& store) {
        store.compareSet(kFailedKey, "", concat(kind, rank, ": ", reason));
        append(store, size, kFailuresKey, concat(rank, " "));
      },
      kPatience);
}

template <typename Found>
std::optional<Found> FailureBoard::found(
    std::function<std::optional<Found>(c10d::Store&)> question) noexcept {
  auto answer = std::make_shared<std::optional<Found>>();
  const bool answered = worker_.ask(
      [answer, question = std::move(question)](c10d::Store& store) { *answer = question(store); },
      kPatience);
  if (!answered || !*answer) return std::nullopt;
  shared_->told = true;
  return *answer;
}

std::optional<FailureBoard::News> FailureBoard::poll() noexcept {
  return found<News>(
      [rank = rank_](c10d::Store& store) { return news_of(read(store, kFailedKey), rank); });
}

void FailureBoard::publish_exit(int64_t rounds) noexcept {
  worker_.ask(
      [rank = rank_, size = size_, rounds](c10d::Store& store) {
        std::istringstream entries(read(store, kExitsKey).value_or(""));
        int other;
        int64_t others_rounds;
        while (entries >> other >> others_rounds) {
          if (other == rank) return;
        }
        append(store, size, kExitsKey, concat(rank, " ", rounds, " "));
      },
      kPatience);
}

std::optional<std::string> FailureBoard::poll_exit(int64_t round) noexcept {
  const Member me{.rank = rank_, .size = size_, .round = round};
  return found<std::string>(
      [me](c10d::Store& store) { return exited_before(read(store, kExitsKey), me); });
}

std::optional<FailureBoard::News> FailureBoard::news(int64_t round) noexcept {
  const Member me{.rank = rank_, .size = size_, .round = round};
  return found<News>([me](c10d::Store& store) { return news_in(store, me); });
}

void FailureBoard::beat(std::function<std::optional<Whereabouts>()> where, OnNews on_news) {
  worker_.repeat(
      [rank = rank_, size = size_, shared = shared_, where = std::move(where),
       on_news = std::move(on_news)](c10d::Store& store) {
        const std::optional<Whereabouts> here = where();
        if (!here) return;
        store.set(beat_key(rank), heartbeat_text({.number = ++shared->beats, .where = *here}));
        if (!on_news || !here->waits) return;
        const auto news = news_in(store, {.rank = rank, .size = size, .round = here->round});
        if (!news) return;
        shared->told = true;
        on_news(*news);
      },
      kBetweenNews);
}

std::shared_ptr<const Snapshot> FailureBoard::look() noexcept {
  auto found = std::make_shared<Snapshot>();
  const bool answered = worker_.ask(
      [found, size = size_](c10d::Store& store) {
        for (int rank = 0; rank < size; ++rank) {
          const auto written = read(store, beat_key(rank));
          found->beats.push_back(written ? parse_heartbeat(*written) : std::nullopt);
        }
        std::istringstream failures(read(store, kFailuresKey).value_or(""));
        for (int rank; failures >> rank;) found->failed.insert(rank);
      },
      kPatience);
  return answered ? found : nullptr;
}

OtherRanks FailureBoard::others(const Position& here) noexcept {
  const auto before = look();
  if (before) std::this_thread::sleep_for(kBetweenLooks);
  return compare(before, before ? look() : nullptr, here);
}

OtherRanks FailureBoard::compare(const std::shared_ptr<const Snapshot>& before,
                                 const std::shared_ptr<const Snapshot>& after,
                                 const Position& here) const {
  if (!before || !after) {
    return {
        .causes = {},
        .failed = {},
        .nobody =
            "The job's store does not answer: the process that has it (torchrun's agent, "
            "or else rank 0, at MASTER_ADDR) was killed or stopped, or is cut off. A rank that is "
            "named below may wait for that one too.",
        .store_is_silent = true};
  }
  return where_others_are(*before, *after, rank_, here);
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
