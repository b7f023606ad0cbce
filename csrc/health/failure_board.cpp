#include "health/failure_board.h"

#include <memory>
#include <mutex>
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

// The first rank among `size`, but the observer, that exited before the observer's round was done.
std::optional<std::string> exited_before(const std::optional<std::string>& text,
                                         const Observer& observer, int size) {
  std::istringstream entries(text.value_or(""));
  int rank;
  int64_t rounds;
  while (entries >> rank >> rounds) {
    if (rank >= 0 && rank < size && rank != observer.rank && rounds < observer.round) {
      return concat("rank ", rank, " exited after ", rounds, " rounds");
    }
  }
  return std::nullopt;
}

std::optional<FailureBoard::News> news_in(c10d::Store& store, const Observer& observer, int size) {
  if (auto failed = news_of(read(store, kFailedKey), observer.rank)) return failed;
  const auto exited = exited_before(read(store, kExitsKey), observer, size);
  if (!exited) return std::nullopt;
  return FailureBoard::News{.text = *exited, .blame = Blame::kThisRank};
}

std::string in_words(const OtherRanks& others) {
  std::string places;
  for (const auto& list : {others.causes, others.failed}) {
    for (const std::string& rank : list) places += (places.empty() ? "" : "; ") + rank;
  }
  return places.empty() ? others.nobody : concat("Where the others are: ", places, ".");
}

}  // namespace

struct FailureBoard::Noted {
  mutable std::mutex mutex;
  bool begun = false;
  Whereabouts here{};

  Whereabouts whereabouts() const {
    const std::lock_guard lock(mutex);
    return here;
  }
};

FailureBoard::FailureBoard(const c10::intrusive_ptr<c10d::Store>& store, int rank, int size)
    : rank_(rank),
      size_(size),
      told_(std::make_shared<std::atomic<bool>>(false)),
      worker_(store),
      noted_(std::make_shared<Noted>()) {
  BAGUA_CHECK_ARG(rank >= 0 && rank < size, "rank ", rank, " is outside a group of size ", size);
}

void FailureBoard::publish(const std::string& reason, Blame blame) noexcept {
  const char kind = kind_of(blame, *told_);
  worker_.ask(
      [rank = rank_, size = size_, reason, kind](c10d::Store& store) {
        store.compareSet(kFailedKey, "", concat(kind, rank, ": ", reason));
        append(store, size, kFailuresKey, concat(rank, " "));
      },
      kPatience);
}

std::optional<FailureBoard::News> FailureBoard::poll() noexcept {
  auto text = std::make_shared<std::optional<std::string>>();
  const bool answered =
      worker_.ask([text](c10d::Store& store) { *text = read(store, kFailedKey); }, kPatience);
  const std::optional<News> news = answered ? news_of(*text, rank_) : std::nullopt;
  if (news) *told_ = true;
  return news;
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
  auto text = std::make_shared<std::optional<std::string>>();
  const bool answered =
      worker_.ask([text](c10d::Store& store) { *text = read(store, kExitsKey); }, kPatience);
  if (!answered) return std::nullopt;
  std::optional<std::string> exited = exited_before(*text, {.rank = rank_, .round = round}, size_);
  if (exited) *told_ = true;
  return exited;
}

std::optional<FailureBoard::News> FailureBoard::news(int64_t round) noexcept {
  auto found = std::make_shared<std::optional<News>>();
  const Observer me{.rank = rank_, .round = round};
  const bool answered = worker_.ask(
      [found, me, size = size_](c10d::Store& store) { *found = news_in(store, me, size); },
      kPatience);
  if (!answered || !*found) return std::nullopt;
  *told_ = true;
  return *found;
}

void FailureBoard::beat(std::function<std::optional<Whereabouts>()> where, OnNews on_news) {
  worker_.repeat(
      [rank = rank_, size = size_, told = told_, where = std::move(where),
       on_news = std::move(on_news), number = std::make_shared<int64_t>(0)](c10d::Store& store) {
        const std::optional<Whereabouts> here = where();
        if (!here) return;
        store.set(beat_key(rank), heartbeat_text({.number = ++*number, .where = *here}));
        if (!on_news || !here->waits) return;
        const auto news = news_in(store, {.rank = rank, .round = here->round}, size);
        if (!news) return;
        *told = true;
        on_news(*news);
      },
      kBetweenNews);
}

void FailureBoard::note(Whereabouts here) {
  {
    const std::lock_guard lock(noted_->mutex);
    const bool first = !std::exchange(noted_->begun, true);
    noted_->here = std::move(here);
    if (!first) return;
  }
  beat_while_alive(noted_);
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

OtherRanks FailureBoard::others(Observer observer) noexcept {
  const auto before = look();
  if (before) std::this_thread::sleep_for(kBetweenLooks);
  return found(before, before ? look() : nullptr, std::move(observer));
}

std::string FailureBoard::survey(int64_t round, const std::string& unit, bool everyone) noexcept {
  return in_words(others({.rank = rank_, .round = round, .unit = unit, .everyone = everyone}));
}

OtherRanks FailureBoard::found(const std::shared_ptr<const Snapshot>& before,
                               const std::shared_ptr<const Snapshot>& after,
                               Observer observer) const {
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
  observer.rank = rank_;
  return where_others_are(*before, *after, observer);
}

std::string FailureBoard::compare(const std::shared_ptr<const Snapshot>& before,
                                  const std::shared_ptr<const Snapshot>& after, int64_t round,
                                  const std::string& unit, bool everyone) const {
  return in_words(
      found(before, after, {.rank = rank_, .round = round, .unit = unit, .everyone = everyone}));
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
