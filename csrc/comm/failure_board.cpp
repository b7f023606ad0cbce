#include "comm/failure_board.h"

#include <memory>
#include <set>
#include <sstream>
#include <thread>
#include <utility>
#include <vector>

#include <torch/csrc/distributed/c10d/Store.hpp>

#include "base/check.h"

namespace bagua {
namespace {

using std::chrono::milliseconds;

constexpr const char* kFailedKey = "failed";      // kind, "3: reason" of the first rank that failed
constexpr const char* kFailuresKey = "failures";  // "3 0 ": all that failed, in order
constexpr const char* kLeftKey = "left";  // "rank rounds" of each rank that left, "0 12 3 7 "
constexpr char kCause = '!', kEcho = '?';
constexpr milliseconds kBeat(500);
constexpr milliseconds kBetweenLooks(1300);  // two beats, and what a busy machine takes
constexpr milliseconds kPatience(2000);      // with a store that does not answer

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

// "number round text", as it stands in the store.
struct Beat {
  int64_t number = 0;
  int64_t round = 0;
  std::string text;
};

std::optional<Beat> parse_beat(const std::string& written) {
  std::istringstream stream(written);
  Beat beat;
  if (!(stream >> beat.number >> beat.round)) return std::nullopt;
  std::getline(stream >> std::ws, beat.text);
  return beat;
}

std::string rounds_text(int64_t count) { return concat(count, count == 1 ? " round" : " rounds"); }

// Empty for a rank that is where this one is.
std::string describe(int rank, int64_t round, const std::optional<Beat>& before,
                     const std::optional<Beat>& after, bool failed) {
  if (!after) return concat("rank ", rank, " has never been heard of");
  const std::string place = concat("round ", after->round, ": ", after->text);
  if (failed) return concat("rank ", rank, " has failed too, in round ", after->round);
  if (before && before->number == after->number) {
    return concat("rank ", rank, " is silent (killed, stopped or cut off), last heard of in ",
                  place);
  }
  if (after->round < round) {
    return concat("rank ", rank, " is ", rounds_text(round - after->round), " behind, in ", place);
  }
  if (after->round > round) {
    return concat("rank ", rank, " is ", rounds_text(after->round - round), " ahead, in ", place);
  }
  return "";
}

}  // namespace

FailureBoard::FailureBoard(const c10::intrusive_ptr<c10d::Store>& store, int rank, int size)
    : rank_(rank), size_(size), clerk_(store) {
  BAGUA_CHECK_ARG(rank >= 0 && rank < size, "rank ", rank, " is outside a group of size ", size);
}

void FailureBoard::publish(const std::string& reason, bool is_echo) noexcept {
  clerk_.ask(
      [rank = rank_, size = size_, reason, is_echo](c10d::Store& store) {
        const char kind = is_echo ? kEcho : kCause;
        store.compareSet(kFailedKey, "", concat(kind, rank, ": ", reason));
        append(store, size, kFailuresKey, concat(rank, " "));
      },
      kPatience);
}

std::optional<FailureBoard::News> FailureBoard::poll() noexcept {
  auto text = std::make_shared<std::optional<std::string>>();
  const bool answered =
      clerk_.ask([text](c10d::Store& store) { *text = read(store, kFailedKey); }, kPatience);
  if (!answered || !*text || (*text)->empty()) return std::nullopt;
  const std::string entry = (*text)->substr(1);
  if (entry.starts_with(concat(rank_, ": "))) return std::nullopt;
  return News{.text = "rank " + entry, .is_echo = (*text)->front() == kEcho};
}

void FailureBoard::leave(int64_t rounds) noexcept {
  clerk_.ask(
      [rank = rank_, size = size_, rounds](c10d::Store& store) {
        std::istringstream entries(read(store, kLeftKey).value_or(""));
        int other;
        int64_t others_rounds;
        while (entries >> other >> others_rounds) {
          if (other == rank) return;
        }
        append(store, size, kLeftKey, concat(rank, " ", rounds, " "));
      },
      kPatience);
}

std::optional<std::string> FailureBoard::poll_left(int64_t round) noexcept {
  auto text = std::make_shared<std::optional<std::string>>();
  const bool answered =
      clerk_.ask([text](c10d::Store& store) { *text = read(store, kLeftKey); }, kPatience);
  if (!answered) return std::nullopt;
  std::istringstream entries(text->value_or(""));
  int rank;
  int64_t rounds;
  while (entries >> rank >> rounds) {
    if (rank != rank_ && rounds < round) {
      return concat("rank ", rank, " left after ", rounds, " rounds");
    }
  }
  return std::nullopt;
}

void FailureBoard::beat(std::function<std::optional<Whereabouts>()> where) {
  clerk_.repeat(
      [key = beat_key(rank_), where = std::move(where),
       number = std::make_shared<int64_t>(0)](c10d::Store& store) {
        const std::optional<Whereabouts> here = where();
        if (here) store.set(key, concat(++*number, " ", here->round, " ", here->text));
      },
      kBeat);
}

std::string FailureBoard::survey(int64_t round) noexcept {
  struct Look {
    std::vector<std::optional<Beat>> beats;
    std::set<int> failed;
  };
  const auto look = [&]() -> std::shared_ptr<const Look> {
    auto found = std::make_shared<Look>();
    const bool answered = clerk_.ask(
        [found, size = size_](c10d::Store& store) {
          for (int rank = 0; rank < size; ++rank) {
            const auto written = read(store, beat_key(rank));
            found->beats.push_back(written ? parse_beat(*written) : std::nullopt);
          }
          std::istringstream failures(read(store, kFailuresKey).value_or(""));
          for (int rank; failures >> rank;) found->failed.insert(rank);
        },
        kPatience);
    return answered ? found : nullptr;
  };
  const auto before = look();
  if (before) std::this_thread::sleep_for(kBetweenLooks);
  const auto after = before ? look() : nullptr;
  if (!after) {
    return "The job's store does not answer: the process that has it (torchrun's agent, or else "
           "rank 0, at MASTER_ADDR) was killed or stopped, or is cut off.";
  }
  std::string places;
  for (int rank = 0; rank < size_; ++rank) {
    if (rank == rank_) continue;
    const std::string place = describe(rank, round, before->beats[rank], after->beats[rank],
                                       after->failed.contains(rank));
    if (!place.empty()) places += (places.empty() ? "" : "; ") + place;
  }
  if (places.empty()) return "No rank is silent, behind or ahead.";
  return concat("Where the others are: ", places, ".");
}

}  // namespace bagua
