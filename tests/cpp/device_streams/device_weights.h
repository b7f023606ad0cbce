// The sample of the weights on the fake device. Included by device_streams.cpp.
#pragma once

#include <ATen/ops/arange.h>

#include "device_streams/noting_codec.h"
#include "engine/weights_sample.h"
#include "fake_device/fake_device_torch.h"

namespace bagua::fake {

inline void expect_no_race(const std::string& where) {
  const std::vector<std::string> races = Device::instance().take_races();
  expect(races.empty(), where, ": ", races.size(),
         " races, the first: ", races.empty() ? "" : races.front());
}

// Digests come so many rounds later, equal where the weights were, and an optimizer on the caller's
// stream gets in nobody's way.
inline void weights_are_compared_later(at::Device device) {
  constexpr int64_t kEvery = 3, kChanged = 20;
  std::vector<at::Tensor> weights[2];
  std::vector<std::unique_ptr<WeightsSample>> samples;
  for (auto& own : weights) {
    for (const int64_t rows : {30, 1, 70}) {
      own.push_back(at::arange(rows * 50, at::kFloat).view({rows, 50}).to(device).t());
    }
    samples.push_back(std::make_unique<WeightsSample>(
        std::vector<std::pair<std::string, at::Tensor>>{
            {"a", own[0]}, {"b", own[1]}, {"c", own[2]}},
        kEvery));
  }
  int found = 0;
  for (int64_t round = 1; round < kChanged + kEvery + WeightsSample::kDelay; ++round) {
    if (round == kChanged) weights[1][2].select(0, 49).select(0, 69).add_(1);
    for (const auto& sample : samples) sample->take_early(round);
    const auto mine = samples[0]->take(round), theirs = samples[1]->take(round);
    const bool expected = round > WeightsSample::kDelay;
    expect(mine.has_value() == expected && theirs.has_value() == expected, "round ", round,
           " has another digest than expected");
    for (auto& own : weights) {
      for (at::Tensor& tensor : own) tensor.mul_(0.5);
    }
    if (!mine) continue;
    expect(mine->round == round - WeightsSample::kDelay, "a digest of another round");
    const bool equal = combined(mine->parts) == combined(theirs->parts);
    expect(mine->early_parts == mine->parts && theirs->early_parts == theirs->parts, "early parts");
    expect(equal || mine->round >= kChanged, "equal weights are found different");
    expect(equal || mine->parts[0] == theirs->parts[0] || mine->first == 2, "another weight");
    found += equal ? 0 : 1;
  }
  expect(found == 1, "the change was found ", found, " times");
  expect_no_race("samples of the weights");
}

}  // namespace bagua::fake
