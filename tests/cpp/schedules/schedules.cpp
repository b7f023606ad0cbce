// Random schedules of whole engine lives under ThreadSanitizer: `make soak-schedules`.
//
// Usage: schedules [--count N] [--seed S] [--at-once K]. Each schedule makes the engines of all
// ranks with a small random plan, lets them run through delays at random points and at most a few
// faults, compares what every rank was told and holds, and destroys all. Its scenario, plan, delays
// and faults follow from its seed; the order of threads is the machine's, which has K schedules at
// once to care for. Prints how many of each scenario ran. A schedule that fails or does not end
// within a minute is named by its seed: `--seed S --count 1`.
#include <algorithm>
#include <array>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <mutex>

#include <ATen/Parallel.h>
#include <unistd.h>

#include "schedules/averages.h"
#include "schedules/fates.h"
#include "schedules/faults.h"
#include "schedules/rounds.h"
#include "stress/dynamic.h"
#include "stress/shared_memory.h"
#include "stress/sparse.h"

namespace bagua::stress {
namespace {

using Clock = std::chrono::steady_clock;

struct Scenario {
  const char* name;
  void (*run)(Random&, const Delays&);
  int weight;
};

constexpr std::array kScenarios{
    Scenario{"rounds end with the right bits", rounds_end_with_the_right_bits, 4},
    Scenario{"ranks meet their fates", ranks_meet_their_fates, 15},
    Scenario{"a wait ends at the deadline", a_wait_ends_at_the_deadline, 1},
    Scenario{"another plan is found before bytes are mixed",
             another_plan_is_found_before_bytes_are_mixed, 1},
    Scenario{"averages keep the sum in any order", averages_keep_the_sum_in_any_order, 3},
    Scenario{"a lane ends at any moment", a_lane_ends_at_any_moment, 2},
    Scenario{"sparse memories change together", sparse_memories_change_together, 1},
    Scenario{"jobs of dynamic lanes give equal bits", jobs_of_dynamic_lanes_give_equal_bits, 1},
    Scenario{"a dynamic lane that ends is told to every rank",
             a_dynamic_lane_that_ends_is_told_to_every_rank, 1},
    Scenario{"shared memory carries every call", shared_memory_carries_every_call, 1},
    Scenario{"buckets are reduced in place", buckets_are_reduced_in_place, 1},
};

size_t draw_scenario(Random& random) {
  int total = 0;
  for (const Scenario& scenario : kScenarios) total += scenario.weight;
  int ticket = between(random, 0, total - 1);
  size_t index = 0;
  while (ticket >= kScenarios[index].weight) ticket -= kScenarios[index++].weight;
  return index;
}

// Several threads, each of which runs one schedule after the other.
class Program {
 public:
  Program(uint64_t seed, int64_t count, int at_once)
      : first_(seed), count_(count), under_way_(at_once) {}

  int run() {
    const auto start = Clock::now();
    std::vector<std::thread> threads;
    for (Schedule& place : under_way_) threads.emplace_back([&] { work(place); });
    std::thread watch([&] { end_if_one_hangs(); });
    for (std::thread& thread : threads) thread.join();
    over_ = true;
    watch.join();
    const double seconds = std::chrono::duration<double>(Clock::now() - start).count();
    for (size_t i = 0; i < kScenarios.size(); ++i) {
      std::printf("%7lld  %s, %.0f ms each\n", static_cast<long long>(counts_[i]),
                  kScenarios[i].name, counts_[i] ? 1e3 * seconds_[i] / counts_[i] : 0);
    }
    std::printf("%lld schedules passed in %.0f s, %zu at once, seeds %llu to %llu\n",
                static_cast<long long>(done_), seconds, under_way_.size(),
                static_cast<unsigned long long>(first_),
                static_cast<unsigned long long>(first_ + count_ - 1));
    return 0;
  }

 private:
  struct Schedule {
    uint64_t seed = 0;
    const char* name = nullptr;  // null: none
    Clock::time_point start;
  };

  void work(Schedule& place) {
    at::set_num_threads(1);
    while (true) {
      Random random;
      size_t index = 0;
      {
        const std::lock_guard lock(mutex_);
        if (next_ == count_) return;
        const uint64_t seed = first_ + next_++;
        random.seed(seed);
        index = draw_scenario(random);
        place = {seed, kScenarios[index].name, Clock::now()};
      }
      try {
        const auto delays = std::make_shared<Turbulence>(random(), between(random, 0, 5));
        kScenarios[index].run(random, delays);
        // Detached lanes end too, and all that the schedule made is freed.
        while (delays.use_count() > 1) std::this_thread::sleep_for(milliseconds(1));
      } catch (const std::exception& error) {
        end(place, error.what());
      }
      const std::lock_guard lock(mutex_);
      counts_[index] += 1;
      seconds_[index] += std::chrono::duration<double>(Clock::now() - place.start).count();
      place.name = nullptr;
      if (++done_ % 1000 == 0) {
        std::printf("%lld schedules\n", static_cast<long long>(done_));
        std::fflush(stdout);
      }
    }
  }

  [[noreturn]] static void end(const Schedule& schedule, const char* what) {
    std::printf("failed: seed %llu: %s: %s\n", static_cast<unsigned long long>(schedule.seed),
                schedule.name, what);
    std::fflush(stdout);
    _exit(1);  // the other schedules are under way
  }

  void end_if_one_hangs() {
    while (!over_) {
      std::this_thread::sleep_for(milliseconds(100));
      const std::lock_guard lock(mutex_);
      for (const Schedule& schedule : under_way_) {
        if (schedule.name && Clock::now() - schedule.start > std::chrono::minutes(1)) {
          end(schedule, "has not ended within a minute");
        }
      }
    }
  }

  const uint64_t first_;
  const int64_t count_;
  std::mutex mutex_;
  std::vector<Schedule> under_way_;
  int64_t next_ = 0, done_ = 0;
  std::array<int64_t, kScenarios.size()> counts_{};
  std::array<double, kScenarios.size()> seconds_{};
  std::atomic<bool> over_{false};
};

}  // namespace
}  // namespace bagua::stress

int main(int count, char** words) {
  uint64_t seed = 1;
  int64_t schedules = 1000;
  int at_once = 24;
  for (int i = 1; i + 1 < count; i += 2) {
    const unsigned long long value = std::strtoull(words[i + 1], nullptr, 10);
    if (std::strcmp(words[i], "--seed") == 0) seed = value;
    if (std::strcmp(words[i], "--count") == 0) schedules = static_cast<int64_t>(value);
    if (std::strcmp(words[i], "--at-once") == 0) at_once = static_cast<int>(value);
  }
  at_once = static_cast<int>(std::clamp<int64_t>(at_once, 1, std::max<int64_t>(schedules, 1)));
  return bagua::stress::Program(seed, schedules, at_once).run();
}
