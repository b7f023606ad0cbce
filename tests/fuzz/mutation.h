// Changes to a valid input, as libFuzzer makes them, without its knowledge of coverage.
#pragma once

#include <cstdint>
#include <random>
#include <vector>

#include "target.h"

namespace bagua::fuzz {

class Mutation {
 public:
  Mutation(uint64_t seed, std::vector<Bytes> examples)
      : random_(seed), examples_(std::move(examples)) {}

  // Random bytes one time in eight; otherwise an example with one to eight changes.
  const Bytes& next();

 private:
  uint64_t below(uint64_t bound) { return random_() % bound; }
  void change();
  void overwrite(uint64_t value, size_t width);

  std::mt19937_64 random_;
  const std::vector<Bytes> examples_;
  Bytes input_;
};

}  // namespace bagua::fuzz
