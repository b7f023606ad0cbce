// Sparse means in two lanes whose memories share an outcome: equal bits, and no half rounds.
#pragma once

#include <limits>

#include "op/sparse.h"
#include "stress/checks.h"

namespace bagua::stress {

// What all ranks know: which rank brings an infinity, in which lane and round.
struct SparsePlan {
  explicit SparsePlan(Random& random, int ranks)
      : numel(between(random, 1, between(random, 0, 9) == 0 ? 300000 : 5000)),
        k(between(random, 1, static_cast<int>(std::min<int64_t>(numel, 500)))),
        rounds(between(random, 2, 6)),
        bad_round(between(random, 1, rounds)),
        bad_rank(between(random, 0, ranks - 1)),
        bad_lane(between(random, 0, 1)) {}

  int64_t numel, k;
  int rounds, bad_round, bad_rank, bad_lane;
};

// One lane of one rank.
class SparseLane {
 public:
  // The second lane meets in the place that an engine would have for its control messages.
  SparseLane(const World& world, const SparsePlan& plan, int rank, int lane,
             std::shared_ptr<RoundOutcome> outcome)
      : plan_(plan), rank_(rank), lane_(lane), flat_(zeros(plan.numel, at::kFloat)) {
    const auto communicator = world.connect(lane == 0 ? world.places[0] : world.control, rank);
    const auto scratch = std::make_shared<Scratch>();
    const std::vector<at::Tensor> initial{zeros(plan.numel, at::kFloat), zeros(1, at::kLong)};
    memory_ = std::make_shared<RoundMemory>(initial, std::move(outcome));
    op_ = std::make_unique<Sparse>(communicator, scratch, plan.numel, plan.k, memory_,
                                   Sparse::Options{});
  }

  void run(int round) noexcept try {
    float* values = flat_.data_ptr<float>();
    for (int64_t i = 0; i < plan_.numel; ++i) values[i] = value_of(rank_, round, lane_, i);
    if (round == plan_.bad_round && rank_ == plan_.bad_rank && lane_ == plan_.bad_lane) {
      values[plan_.numel / 2] = std::numeric_limits<float>::infinity();
    }
    op_->run(flat_, {.number = round, .grad_scale = 1.0f, .bucket = bucket_});
  } catch (...) {
    error_ = std::current_exception();
  }

  at::Tensor result() const {
    if (error_) std::rethrow_exception(error_);
    return flat_.clone();
  }
  int64_t committed() { return *memory_->value(1).const_data_ptr<int64_t>(); }

 private:
  static at::Tensor zeros(int64_t numel, at::ScalarType dtype) {
    return at::empty({numel}, dtype).zero_();
  }

  const SparsePlan& plan_;
  int rank_, lane_;
  at::Tensor flat_;
  std::shared_ptr<RoundMemory> memory_;
  std::unique_ptr<Sparse> op_;
  std::exception_ptr error_;
  const std::string bucket_ = "stress";
};

inline void sparse_memories_change_together(Random& random, const Delays& delays) {
  const World world(random, 1, kPatient, {}, delays);
  const SparsePlan plan(random, world.ranks);
  std::vector<std::vector<at::Tensor>> results(world.ranks);
  const auto endings = run_ranks(world, [&](int rank) {
    const auto outcome = std::make_shared<RoundOutcome>();
    SparseLane first(world, plan, rank, 0, outcome), second(world, plan, rank, 1, outcome);
    for (int round = 1; round <= plan.rounds; ++round) {
      std::thread beside([&] { second.run(round); });
      first.run(round);
      beside.join();
      results[rank].push_back(first.result());
      results[rank].push_back(second.result());
    }
    for (SparseLane* lane : {&first, &second}) {
      expect(lane->committed() == plan.rounds - 1, "of ", plan.rounds, " rounds, one of them bad, ",
             lane->committed(), " were committed");
    }
  });
  for (const Ending& ending : endings) expect(ending.error.empty(), ending.error);
  for (const auto& other : results) {
    for (size_t i = 0; i < other.size(); ++i) {
      expect(same_bits(results[0][i], other[i]), "ranks hold different bits in lane ", i % 2);
    }
  }
}

}  // namespace bagua::stress
