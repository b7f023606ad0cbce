#include "comm/gathering.h"

#include <algorithm>
#include <exception>
#include <string_view>
#include <thread>
#include <utility>

#include "base/check.h"
#include "health/error_text.h"
#include "health/sanitize.h"

namespace bagua {
namespace {

using std::chrono::milliseconds;
using std::chrono::steady_clock;

// A wait keeps the store's connection to itself, and torch warns of one that times out: after the
// first slice a rank asks again and again, with pauses that grow with the time that it has waited.
constexpr milliseconds kSlice(500);
constexpr int kPartOfThePause = 8;
// All texts; descriptions of plans are among them.
constexpr size_t kMostRecordBytes = size_t{256} << 20;

[[noreturn]] void refuse(const std::string& key, std::string_view value) {
  std::string shown = sanitize_untrusted(value.substr(0, 40));
  std::replace(shown.begin(), shown.end(), '\n', ' ');
  throw Error(
      concat("the store has '", shown, "' (", value.size(), " bytes) under '", key,
             "', which is not of the form that it should be: something that is not a rank of "
             "this job has written to it. Keep the store's port (MASTER_PORT) from others: "
             "docs/security.md."));
}

std::vector<uint8_t> bytes_of(std::string_view text) { return {text.begin(), text.end()}; }

std::string record(std::string_view name, std::string_view value) {
  return concat(name, " ", value.size(), "\n", value);
}

// Takes "NAME SIZE\n" and that many bytes from the front of `text`; false: there is no such thing.
bool take_record(std::string_view& text, std::string_view& name, std::string_view& value) {
  const size_t line = text.substr(0, 300).find('\n');
  const size_t space = text.substr(0, line).rfind(' ');
  if (line == text.npos || space == text.npos || line - space > 12) return false;
  size_t size = 0;
  for (const char digit : text.substr(space + 1, line - space - 1)) {
    if (digit < '0' || digit > '9') return false;
    size = 10 * size + (digit - '0');
  }
  if (size > text.size() - line - 1) return false;
  name = text.substr(0, space);
  value = text.substr(line + 1, size);
  text.remove_prefix(line + 1 + size);
  return true;
}

}  // namespace

Gathering::Gathering(c10::intrusive_ptr<c10d::Store> store, std::string key, Group group,
                     milliseconds timeout, bool counted)
    : store_(std::move(store)),
      key_(std::move(key)),
      group_(group),
      timeout_(timeout),
      deadline_(steady_clock::now() + timeout),
      extended_(store_->hasExtendedApi()),
      counted_(counted) {
  BAGUA_CHECK_ARG(group.rank >= 0 && group.rank < group.size, "rank ", group.rank,
                  " is outside a group of size ", group.size);
}

void Gathering::bring(const std::string& text) {
  if (extended_) {
    store_->append(key_, bytes_of(record(std::to_string(group_.rank), text)));
  } else {
    store_->set(rank_key(group_.rank), bytes_of(text));
  }
  arrive();
}

std::vector<std::string> Gathering::texts(milliseconds timeout) try {
  timeout_ = timeout;
  deadline_ = steady_clock::now() + timeout;
  await_stage();
  std::vector<std::string> texts;
  for (std::optional<std::string>& one : found()) {
    if (!one) refuse(key_, "");
    texts.push_back(std::move(*one));
  }
  return texts;
} catch (const Error&) {
  throw;
} catch (const std::exception& error) {
  throw Error(concat("the job's store does not answer: ", short_text(error)));
}

std::string Gathering::agree(const std::string& failure) {
  const std::string key = concat(key_, "/failed");
  if (failure.empty()) {
    arrive();
    await_stage();
  } else {
    ++stage_;
    failed_ = true;
    store_->compareSet(key, bytes_of(""), bytes_of(failure));
    store_->set(stage_key(), bytes_of("1"));
  }
  return has_failure() ? read(key) : "";
}

bool Gathering::has_failure() { return store_->check({concat(key_, "/failed")}); }

void Gathering::finish() {
  const int64_t all = int64_t{group_.size} * (stage_ + 1);
  if (store_->add(concat(key_, "/count"), failed_ ? 2 : 1) == all) forget();
}

void Gathering::forget() {
  std::vector<std::string> keys{concat(key_, "/count")};
  if (stage_ > 1) keys.push_back(concat(key_, "/failed"));
  for (; stage_ > 0; --stage_) keys.push_back(stage_key());
  if (extended_) keys.push_back(key_);
  for (int rank = 0; rank < (extended_ ? 0 : group_.size); ++rank) keys.push_back(rank_key(rank));
  try {
    for (const std::string& key : keys) store_->deleteKey(key);
  } catch (const std::exception&) {  // a store written in Python may not know how
    return;
  }
}

void Gathering::give_up(const std::string& reason) {
  const std::lock_guard lock(mutex_);
  unwanted_ = reason;
}

// A rank that comes again is in the count already.
void Gathering::arrive() {
  ++stage_;
  const bool again = std::exchange(counted_, false);
  const int64_t here = store_->add(concat(key_, "/count"), again ? 0 : 1);
  const int64_t all = int64_t{group_.size} * stage_;
  // The others may have finished since a rank that comes again was counted.
  const int64_t most = again ? all + group_.size - 1 : all;
  if (here < 1 || here > most) refuse(concat(key_, "/count"), std::to_string(here));
  complete_ = here >= all;
  if (here == all) store_->set(stage_key(), bytes_of("1"));
}

void Gathering::await_stage() {
  if (complete_) return;
  check_wanted();
  const auto start = steady_clock::now();
  complete_ = wait_for_a_slice();
  while (!complete_) {
    check_wanted();
    if ((complete_ = store_->check({stage_key()}))) return;
    const auto now = steady_clock::now();
    if (now >= deadline_) throw TimeoutError(missing());
    std::this_thread::sleep_for(std::min<steady_clock::duration>(
        {(now - start) / kPartOfThePause, deadline_ - now, kSlice}));
  }
}

// Whether the stage was complete within it.
bool Gathering::wait_for_a_slice() {
  const auto begun = steady_clock::now();
  const auto left = std::chrono::duration_cast<milliseconds>(deadline_ - begun);
  const auto slice = std::clamp(left, milliseconds{1}, kSlice);
  try {
    store_->wait({stage_key()}, slice);
    return true;
  } catch (const std::exception&) {
    if (steady_clock::now() - begun < slice / 2) throw;  // the store does not work
    return false;
  }
}

void Gathering::check_wanted() {
  const std::lock_guard lock(mutex_);
  if (!unwanted_.empty()) throw Error(unwanted_);
}

// get() of torch's store is two requests; this is one, of a key that is there.
std::string Gathering::read(const std::string& key) {
  const std::vector<uint8_t> value =
      extended_ ? store_->compareSet(key, bytes_of(""), bytes_of("")) : store_->get(key);
  return {value.begin(), value.end()};
}

// By rank. Where a rank has come twice its last text counts.
std::vector<std::optional<std::string>> Gathering::found() {
  std::vector<std::optional<std::string>> texts(group_.size);
  if (!extended_) {
    for (int rank = 0; rank < group_.size; ++rank) {
      if (store_->check({rank_key(rank)})) texts[rank] = read(rank_key(rank));
    }
    return texts;
  }
  const std::string all = read(key_);
  std::string_view rest = all, name, text;
  if (all.size() > kMostRecordBytes) refuse(key_, all);
  while (!rest.empty()) {
    if (!take_record(rest, name, text) || name.empty() || name.size() > 9) refuse(key_, all);
    size_t rank = 0;
    for (const char digit : name) {
      if (digit < '0' || digit > '9') refuse(key_, all);
      rank = 10 * rank + (digit - '0');
    }
    if (rank >= texts.size()) refuse(key_, all);
    texts[rank] = std::string(text);
  }
  return texts;
}

std::string Gathering::missing() {
  std::string ranks;
  int absent = 0;
  const auto texts = found();
  for (int rank = 0; rank < group_.size; ++rank) {
    if (texts[rank]) continue;
    ranks += concat(ranks.empty() ? "" : ", ", rank);
    ++absent;
  }
  if (absent == 0) return "not all ranks have come within the timeout";
  return concat(absent == 1 ? "rank " : "ranks ", ranks, " did not come within the timeout of ",
                std::chrono::duration<double>(timeout_).count(), " s");
}

std::string Gathering::stage_key() const { return concat(key_, "/", stage_); }

std::string Gathering::rank_key(int rank) const { return concat(key_, "/rank", rank); }

TransportsMeeting::TransportsMeeting(std::shared_ptr<Gathering> gathering, int transports,
                                     Exchange exchange)
    : gathering_(std::move(gathering)), transports_(transports), exchange_(std::move(exchange)) {}

void TransportsMeeting::set(const std::string& key, const std::vector<uint8_t>& value) {
  const std::lock_guard lock(mutex_);
  BAGUA_CHECK(!gathered_, "a transport sets '", key, "' after it has read other ranks' keys");
  values_[key] = value;
}

std::vector<uint8_t> TransportsMeeting::get(const std::string& key, bool first) {
  std::unique_lock lock(mutex_);
  if (first && ++reading_ == transports_) gather();
  while (!gathered_) {
    changed_.wait_for(lock, kSlice);
    gathering_->check_wanted();
  }
  if (failure_) std::rethrow_exception(failure_);
  const auto found = values_.find(key);
  BAGUA_CHECK(found != values_.end(), "no rank has set '", sanitize_untrusted(key), "'");
  return found->second;
}

// With the lock, which nobody else wants: all others wait until it is done.
void TransportsMeeting::gather() try {
  std::string own;
  for (const auto& [name, value] : values_)
    own += record(name, std::string(value.begin(), value.end()));
  for (const std::string& text : texts(own)) {
    std::string_view rest = text, name, value;
    while (take_record(rest, name, value)) values_[std::string(name)] = bytes_of(value);
  }
  gathered_ = true;
  changed_.notify_all();
} catch (const std::exception&) {  // get() throws it, to all transports
  failure_ = std::current_exception();
  gathered_ = true;
  changed_.notify_all();
}

std::vector<std::string> TransportsMeeting::texts(const std::string& own) {
  if (exchange_) return exchange_(own);
  gathering_->bring(own);
  return gathering_->texts();
}

GatheringStore::GatheringStore(std::shared_ptr<TransportsMeeting> meeting, int transport)
    : meeting_(std::move(meeting)), prefix_(concat(transport, "/")) {}

c10::intrusive_ptr<c10d::Store> GatheringStore::clone() {
  return c10::intrusive_ptr<Store>::unsafe_reclaim_from_nonowning(this);
}

void GatheringStore::set(const std::string& key, const std::vector<uint8_t>& value) {
  meeting_->set(prefix_ + key, value);
}

std::vector<uint8_t> GatheringStore::get(const std::string& key) {
  return meeting_->get(prefix_ + key, !has_read_.exchange(true));
}

bool GatheringStore::check(const std::vector<std::string>& keys) {
  wait(keys);
  return true;
}

void GatheringStore::wait(const std::vector<std::string>& keys) {
  for (const std::string& key : keys) get(key);
}

void GatheringStore::wait(const std::vector<std::string>& keys, const milliseconds&) { wait(keys); }

int64_t GatheringStore::add(const std::string&, int64_t) { throw Error("no count is kept here"); }

bool GatheringStore::deleteKey(const std::string&) { return false; }

int64_t GatheringStore::getNumKeys() { throw Error("keys are not counted here"); }

}  // namespace bagua
