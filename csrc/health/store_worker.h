// A thread that accesses a store, so that no other thread waits for one that does not answer.
#pragma once

#include <chrono>
#include <functional>
#include <memory>
#include <string>

#include <c10/util/intrusive_ptr.h>

#include "base/owner_process.h"

namespace c10d {
class Store;
}

namespace bagua {

// A store's host may be stopped or cut off, and its clients then wait without a limit. Clients of
// the worker wait for a time of their choice.
//
// Thread safety: all methods. Ownership: a clone of the store (another connection where the store
// can make one), which the thread makes before the first question, and anew after one that failed,
// which is put once more. A question owns its data: it may outlive its caller. The first starts the
// thread; the destructor waits a second for one under way, then leaves the thread to itself. After
// fork it does nothing. May fail: never. A question that its client did not wait for is put later,
// at most kMostLate of them; while one is under way for longer than that, no client waits.
class StoreWorker final {
 public:
  using Question = std::function<void(c10d::Store&)>;
  using Milliseconds = std::chrono::milliseconds;

  StoreWorker(const c10::intrusive_ptr<c10d::Store>& store, const std::string& thread_name);
  ~StoreWorker();
  StoreWorker(const StoreWorker&) = delete;
  StoreWorker& operator=(const StoreWorker&) = delete;

  // Puts a question and waits for its end, at most `patience`. False if it has not ended well.
  bool ask(Question question, Milliseconds patience) noexcept;

  // Puts this question at every `interval` from now on. A later call replaces the question, which
  // is put when the one before would have been.
  void repeat(Question question, Milliseconds interval);

 private:
  struct State;
  OwnersOnly<std::shared_ptr<State>> state_;
};

}  // namespace bagua
