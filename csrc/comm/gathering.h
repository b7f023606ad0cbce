// Ranks that meet in a store.
#pragma once

#include <atomic>
#include <chrono>
#include <condition_variable>
#include <cstdint>
#include <exception>
#include <functional>
#include <map>
#include <memory>
#include <mutex>
#include <optional>
#include <string>
#include <vector>

#include <c10/util/intrusive_ptr.h>
#include <torch/csrc/distributed/c10d/Store.hpp>

#include "comm/communicator.h"

namespace bagua {

// All ranks of a group bring a text, and get those of all. The number of requests to the store does
// not depend on the number of ranks, and no key is left behind:
//
// 1. Each appends its text to one key, and counts itself.
// 2. The rank that completes the count sets a key, for which the others wait.
// 3. Each reads the first key, and counts itself again. The last one deletes all keys. Where
// something else tells that all have read it, a rank near the store deletes them instead.
//
// The last rank to come waits for two answers of the store until it has the texts, others for
// three.
//
// A store without append() has a key per rank instead. A rank that died in the middle leaves the
// keys of this one meeting.
//
// Thread safety: one thread; give_up() from any.
class Gathering {
 public:
  // `key`: of these ranks and this meeting alone. `counted`: this rank has come already, to a
  // meeting under this key that it left by an exception.
  Gathering(c10::intrusive_ptr<c10d::Store> store, std::string key, Group group,
            std::chrono::milliseconds timeout, bool counted = false);

  // Steps 1 and 2 without a wait.
  void bring(const std::string& text);

  // After bring(): the texts by rank, waited for as long as `timeout`. Throws TimeoutError, which
  // names the ranks that are missing, Error if the store does not answer or a stranger has written
  // to it, and Error(reason) after give_up().
  std::vector<std::string> texts(std::chrono::milliseconds timeout);
  std::vector<std::string> texts() { return texts(timeout_); }

  // After texts(): the first failure that a rank brings, equal on all ranks; empty: there is none.
  std::string agree(const std::string& failure);

  // Whether a rank has brought a failure to agree().
  bool has_failure();

  // The last call, if all before have returned.
  void finish();

  // Deletes the keys, by one rank: all ranks have their texts, and none calls finish().
  void forget();

  Group group() const { return group_; }
  std::chrono::steady_clock::time_point deadline() const { return deadline_; }
  std::chrono::milliseconds timeout() const { return timeout_; }

  // Ends the wait for other ranks.
  void give_up(const std::string& reason);
  // Throws Error(reason) after that.
  void check_wanted();

 private:
  void arrive();
  void await_stage();
  bool wait_for_a_slice();
  std::string read(const std::string& key);
  std::vector<std::optional<std::string>> found();
  std::string missing();
  std::string stage_key() const;
  std::string rank_key(int rank) const;

  const c10::intrusive_ptr<c10d::Store> store_;
  const std::string key_;
  const Group group_;
  std::chrono::milliseconds timeout_;
  std::chrono::steady_clock::time_point deadline_;
  const bool extended_;  // the store has append()
  bool counted_;
  bool failed_ = false;
  int stage_ = 0;
  bool complete_ = false;  // this rank was the last one of the stage
  std::mutex mutex_;
  std::string unwanted_;  // why nobody waits any more
};

// Transports that connect at the same time, each in a thread: what all of them set before they
// first read is exchanged at once, by a Gathering, which somebody else finishes, or by `exchange`.
//
// Thread safety: a thread per transport.
class TransportsMeeting final {
 public:
  // From the text of this rank those of all, by rank.
  using Exchange = std::function<std::vector<std::string>(const std::string&)>;

  // `exchange`: instead of the gathering, which then only ends the wait; may be empty.
  TransportsMeeting(std::shared_ptr<Gathering> gathering, int transports, Exchange exchange);

  void set(const std::string& key, const std::vector<uint8_t>& value);
  // Blocks, when a transport reads for the first time, until all of them do and all ranks have
  // come.
  std::vector<uint8_t> get(const std::string& key, bool first);

 private:
  void gather();
  std::vector<std::string> texts(const std::string& own);

  const std::shared_ptr<Gathering> gathering_;
  const int transports_;
  const Exchange exchange_;
  std::mutex mutex_;
  std::condition_variable changed_;
  std::map<std::string, std::vector<uint8_t>> values_;
  int reading_ = 0;  // transports that have set all that they set
  bool gathered_ = false;
  std::exception_ptr failure_;
};

// The store of one of them.
class GatheringStore final : public c10d::Store {
 public:
  GatheringStore(std::shared_ptr<TransportsMeeting> meeting, int transport);

  using c10d::Store::set;
  using c10d::Store::wait;
  c10::intrusive_ptr<Store> clone() override;
  void set(const std::string& key, const std::vector<uint8_t>& value) override;
  std::vector<uint8_t> get(const std::string& key) override;
  bool check(const std::vector<std::string>& keys) override;
  void wait(const std::vector<std::string>& keys) override;
  void wait(const std::vector<std::string>& keys, const std::chrono::milliseconds&) override;
  int64_t add(const std::string&, int64_t) override;
  bool deleteKey(const std::string&) override;
  int64_t getNumKeys() override;

 private:
  const std::shared_ptr<TransportsMeeting> meeting_;
  const std::string prefix_;
  std::atomic<bool> has_read_{false};
};

}  // namespace bagua
