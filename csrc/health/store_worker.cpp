#include "health/store_worker.h"

#include <condition_variable>
#include <deque>
#include <exception>
#include <mutex>
#include <thread>
#include <utility>

#include <pthread.h>
#include <torch/csrc/distributed/c10d/Store.hpp>

#include "base/check.h"
#include "base/drop.h"
#include "base/join_or_leave.h"
#include "base/own_sockets.h"

namespace bagua {
namespace {

using Clock = std::chrono::steady_clock;

c10::intrusive_ptr<c10d::Store> clone_of(const c10::intrusive_ptr<c10d::Store>& store) {
  BAGUA_CHECK_ARG(store, "there is no store");
  try {
    const OpenedSockets sockets;
    auto clone = store->clone();
    sockets.give_up_after(store->getTimeout());
    return clone;
  } catch (const std::exception&) {  // a store written in Python may not know how
    return store;
  }
}

}  // namespace

struct StoreWorker::State {
  struct Order {
    Question question;
    bool done = false;
  };

  std::mutex mutex;
  std::condition_variable changed;
  c10::intrusive_ptr<c10d::Store> store;
  std::deque<std::shared_ptr<Order>> orders;
  Question repeated;
  Milliseconds interval{0};
  Clock::time_point next_repetition;
  bool reachable = true;
  bool stopping = false;
  bool finished = false;
  std::thread thread;

  void loop();
  void put(const Question& question, std::unique_lock<std::mutex>& lock) noexcept;
};

void StoreWorker::State::put(const Question& question,
                             std::unique_lock<std::mutex>& lock) noexcept {
  lock.unlock();
  bool answered = true;
  try {
    question(*store);
  } catch (const std::exception&) {
    answered = false;
  }
  lock.lock();
  reachable = reachable && answered;
}

void StoreWorker::State::loop() {
  std::unique_lock lock(mutex);
  while (!stopping) {
    if (!orders.empty()) {
      const std::shared_ptr<Order> order = orders.front();
      orders.pop_front();
      if (reachable) {
        put(order->question, lock);
        order->done = reachable;
      }
      order->question = nullptr;
      changed.notify_all();
    } else if (!repeated || !reachable) {
      changed.wait(lock);
    } else if (Clock::now() >= next_repetition) {
      next_repetition = Clock::now() + interval;
      put(Question(repeated), lock);
    } else {
      changed.wait_until(lock, next_repetition);
    }
  }
  finished = true;
  changed.notify_all();
}

StoreWorker::StoreWorker(const c10::intrusive_ptr<c10d::Store>& store)
    : state_(std::make_shared<State>()) {
  state_->store = clone_of(store);
  state_->thread = std::thread([state = state_.pointer()]() mutable {
    state->loop();
    drop(std::move(state));
  });
  pthread_setname_np(state_->thread.native_handle(), "bagua-store");
}

StoreWorker::~StoreWorker() {
  if (!state_.here()) return;
  State& state = *state_;
  std::unique_lock lock(state.mutex);
  state.stopping = true;
  state.changed.notify_all();
  join_or_leave(state.thread, lock, state.changed, state.finished);
}

bool StoreWorker::ask(Question question, Milliseconds patience) noexcept {
  if (!state_.here()) return false;
  State& state = *state_;
  auto order = std::make_shared<State::Order>();
  order->question = std::move(question);
  std::unique_lock lock(state.mutex);
  if (!state.reachable) return false;
  state.orders.push_back(order);
  state.changed.notify_all();
  state.changed.wait_for(lock, patience, [&] { return !order->question; });
  if (order->question) state.reachable = false;  // it came too late
  return order->done;
}

void StoreWorker::repeat(Question question, Milliseconds interval) {
  if (!state_.here()) return;
  const std::lock_guard lock(state_->mutex);
  const Question before = std::exchange(state_->repeated, std::move(question));
  if (before) return;
  state_->interval = interval;
  state_->next_repetition = Clock::now();
  state_->changed.notify_all();
}

}  // namespace bagua
