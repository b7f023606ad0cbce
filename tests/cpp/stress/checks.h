// What must hold after rounds, and while they run.
#pragma once

#include <algorithm>
#include <atomic>
#include <chrono>
#include <cmath>
#include <cstdlib>
#include <cstring>
#include <string>
#include <thread>
#include <vector>

#include "stress/world.h"

namespace bagua::stress {

// Asks for statistics from a separate thread until destroyed.
class StatsReader {
 public:
  explicit StatsReader(const Engine& engine) : thread_([this, &engine] { read(engine); }) {}
  ~StatsReader() {
    over_ = true;
    thread_.join();
  }

 private:
  void read(const Engine& engine) {
    int64_t last = 0;
    while (!over_) {
      const EngineStats stats = engine.stats();
      if (stats.rounds < last) std::abort();
      last = stats.rounds;
      std::this_thread::sleep_for(std::chrono::microseconds(200));
    }
  }

  std::atomic<bool> over_{false};
  std::thread thread_;
};

inline void check_against_mean(const World& world, size_t index, int64_t round,
                               const at::Tensor& flat) {
  const BucketPlan& plan = world.buckets[index];
  const float* values = flat.data_ptr<float>();
  for (int64_t i = 0; i < flat.numel(); ++i) {
    double expected = 0;
    for (int rank = 0; rank < world.ranks; ++rank) expected += value_of(rank, round, index, i);
    if (plan.op == ReduceOp::kAvg) expected /= world.ranks;
    expect(std::abs(values[i] - expected) <= tolerance(plan, world.ranks), "round ", round,
           ", bucket ", index, " (", plan.codec, "), element ", i, ": ", values[i], ", expected ",
           expected);
  }
}

inline bool same_bits(const at::Tensor& one, const at::Tensor& other) {
  return one.nbytes() == 0 || std::memcmp(one.data_ptr(), other.data_ptr(), one.nbytes()) == 0;
}

inline void expect_same_bits(const at::Tensor& one, const at::Tensor& other, size_t bucket) {
  expect(same_bits(one, other), "ranks hold different bits in bucket ", bucket);
}

// The error that ended each rank (but `but`) must hold these words.
inline void expect_everywhere(const std::vector<Ending>& endings, const std::string& words,
                              int but = -1) {
  for (size_t rank = 0; rank < endings.size(); ++rank) {
    if (static_cast<int>(rank) == but) continue;
    expect(endings[rank].error.find(words) != std::string::npos, "rank ", rank, " was told '",
           endings[rank].error, "', not '", words, "'");
  }
}

// One rank at least ended at its deadline, by a TimeoutError; the others (but `but`) there or by
// its failure, which they may see before their own deadline.
inline void expect_deadline(const std::vector<Ending>& endings, const std::string& words, int but) {
  const auto holds = [](const Ending& ending, const std::string& text) {
    return ending.error.find(text) != std::string::npos;
  };
  for (size_t rank = 0; rank < endings.size(); ++rank) {
    expect(static_cast<int>(rank) == but || holds(endings[rank], words) ||
               holds(endings[rank], " has failed too, in round 1"),
           "rank ", rank, " was told '", endings[rank].error, "', not '", words, "'");
  }
  expect(std::any_of(endings.begin(), endings.end(),
                     [&](const Ending& ending) { return holds(ending, words); }),
         "no rank was told '", words, "'");
  expect(std::any_of(endings.begin(), endings.end(), [](const Ending& e) { return e.timed_out; }),
         "no rank threw a TimeoutError");
}

}  // namespace bagua::stress
