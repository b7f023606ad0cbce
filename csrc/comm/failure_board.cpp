#include "comm/failure_board.h"

#include <exception>
#include <sstream>

#include <torch/csrc/distributed/c10d/Store.hpp>

#include "base/check.h"
#include "comm/foreign_text.h"

namespace bagua {
namespace {

constexpr const char* kFailedKey = "failed";  // "3: reason" of the first rank that failed
constexpr const char* kLeftKey = "left";      // "rank rounds" of each rank that left, "0 12 3 7 "

c10::intrusive_ptr<c10d::Store> clone_of(const c10::intrusive_ptr<c10d::Store>& store) {
  BAGUA_CHECK_ARG(store, "FailureBoard: there is no store");
  try {
    return store->clone();
  } catch (const std::exception&) {  // a store written in Python may not know how
    return store;
  }
}

}  // namespace

FailureBoard::FailureBoard(const c10::intrusive_ptr<c10d::Store>& store, int rank, int size)
    : rank_(rank), size_(size), store_(clone_of(store)) {
  BAGUA_CHECK_ARG(rank >= 0 && rank < size, "rank ", rank, " is outside a group of size ", size);
}

FailureBoard::~FailureBoard() = default;

void FailureBoard::publish(const std::string& reason) noexcept {
  ask([&] { store_->compareSet(kFailedKey, "", concat(rank_, ": ", reason)); });
}

std::optional<std::string> FailureBoard::poll() noexcept {
  std::optional<std::string> failure;
  ask([&] {
    const auto text = read(kFailedKey);
    if (text && !text->starts_with(concat(rank_, ": "))) failure = "rank " + foreign_text(*text);
  });
  return failure;
}

void FailureBoard::leave(int64_t rounds) noexcept {
  ask([&] {
    if (left_) return;
    append(kLeftKey, concat(rank_, " ", rounds, " "));
    left_ = true;
  });
}

std::optional<std::string> FailureBoard::poll_left(int64_t round) noexcept {
  std::optional<std::string> notice;
  ask([&] {
    std::istringstream entries(read(kLeftKey).value_or(""));
    int rank;
    int64_t rounds;
    while (!notice && entries >> rank >> rounds) {
      if (rank < 0 || rank >= size_ || rank == rank_ || rounds >= round) continue;
      notice = concat("rank ", rank, " left after ", rounds, " rounds");
    }
  });
  return notice;
}

// get() would wait for a key that is not there.
std::optional<std::string> FailureBoard::read(const char* key) {
  if (!store_->check({key})) return std::nullopt;
  return store_->get_to_str(key);
}

// Each lost race means that another rank has appended: at most size - 1 times.
void FailureBoard::append(const char* key, const std::string& entry) {
  std::string expected = read(key).value_or("");
  for (int attempt = 0; attempt < size_; ++attempt) {
    const std::string now = store_->compareSet(key, expected, expected + entry);
    if (now == expected + entry) return;
    expected = now;
  }
}

// A store that failed once (its server is gone) is left alone: asking again may block or log.
template <typename Question>
void FailureBoard::ask(Question question) noexcept {
  const std::lock_guard lock(mutex_);
  if (!reachable_) return;
  try {
    question();
  } catch (const std::exception&) {
    reachable_ = false;
  }
}

}  // namespace bagua
