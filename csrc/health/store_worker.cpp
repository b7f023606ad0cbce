#include "health/store_worker.h"

#include <condition_variable>
#include <deque>
#include <exception>
#include <mutex>
#include <optional>
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

// Questions that wait for the thread.
constexpr size_t kMostLate = 16;
// Pause after a connection that failed.
constexpr std::chrono::milliseconds kBetweenConnections(500);

c10::intrusive_ptr<c10d::Store> clone_of(const c10::intrusive_ptr<c10d::Store>& store) {
  try {
    const OpenedSockets sockets;
    auto clone = store->clone();
    sockets.give_up_after(store->getTimeout());
    return clone;
  } catch (const c10::DistError&) {
    throw;
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
  c10::intrusive_ptr<c10d::Store> original;
  std::string thread_name;
  std::deque<std::shared_ptr<Order>> orders;
  Question repeated;
  Milliseconds interval{0};
  Clock::time_point next_repetition;
  std::optional<Clock::time_point> began;  // the question under way
  bool late = false;                       // it has outlasted the patience of one who asked
  bool stopping = false;
  bool finished = false;
  std::thread thread;
  // The thread's connection: null before the first question, and after one that failed.
  c10::intrusive_ptr<c10d::Store> store;
  Clock::time_point next_connection;

  void start(std::shared_ptr<State> self);
  void loop();
  void connect();
  bool put(const Question& question, std::unique_lock<std::mutex>& lock) noexcept;
};

// Again over a new connection where an old one has failed.
bool StoreWorker::State::put(const Question& question,
                             std::unique_lock<std::mutex>& lock) noexcept {
  began = Clock::now();
  lock.unlock();
  bool answered = false;
  for (bool fresh = false; !answered && !fresh;) {
    try {
      fresh = !store;
      if (fresh) connect();
      question(*store);
      answered = true;
    } catch (const std::exception&) {
      store = nullptr;
    }
  }
  lock.lock();
  began.reset();
  late = false;
  return answered;
}

void StoreWorker::State::connect() {
  BAGUA_CHECK(Clock::now() >= next_connection, "the store could not be reached a moment ago");
  next_connection = Clock::now() + kBetweenConnections;  // unless this one succeeds
  store = clone_of(original);
  next_connection = {};
}

void StoreWorker::State::loop() {
  std::unique_lock lock(mutex);
  while (!stopping) {
    if (!orders.empty()) {
      const std::shared_ptr<Order> order = orders.front();
      orders.pop_front();
      order->done = put(order->question, lock);
      order->question = nullptr;
      changed.notify_all();
    } else if (!repeated) {
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

void StoreWorker::State::start(std::shared_ptr<State> self) {
  if (thread.joinable() || stopping) return;
  thread = std::thread([self = std::move(self)]() mutable {
    self->loop();
    drop(std::move(self));
  });
  pthread_setname_np(thread.native_handle(), thread_name.c_str());
}

StoreWorker::StoreWorker(const c10::intrusive_ptr<c10d::Store>& store,
                         const std::string& thread_name)
    : state_(std::make_shared<State>()) {
  BAGUA_CHECK_ARG(store, "there is no store");
  state_->original = store;
  state_->thread_name = thread_name;
}

StoreWorker::~StoreWorker() {
  if (!state_.here()) return;
  State& state = *state_;
  std::unique_lock lock(state.mutex);
  state.stopping = true;
  state.changed.notify_all();
  if (state.thread.joinable()) join_or_leave(state.thread, lock, state.changed, state.finished);
}

bool StoreWorker::ask(Question question, Milliseconds patience) noexcept {
  if (!state_.here()) return false;
  State& state = *state_;
  auto order = std::make_shared<State::Order>();
  order->question = std::move(question);
  std::unique_lock lock(state.mutex);
  if (state.orders.size() >= kMostLate) return false;
  state.start(state_.pointer());
  state.orders.push_back(order);
  state.changed.notify_all();
  const Clock::time_point asked = Clock::now();
  if (state.began && (state.late || asked - *state.began > patience)) return false;
  state.changed.wait_for(lock, patience, [&] { return !order->question; });
  if (order->question && state.began && *state.began - asked < patience / 2) state.late = true;
  return order->done;
}

void StoreWorker::repeat(Question question, Milliseconds interval) {
  if (!state_.here()) return;
  const std::lock_guard lock(state_->mutex);
  state_->start(state_.pointer());
  const Question before = std::exchange(state_->repeated, std::move(question));
  if (before) return;
  state_->interval = interval;
  state_->next_repetition = Clock::now();
  state_->changed.notify_all();
}

}  // namespace bagua
