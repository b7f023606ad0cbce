// Weights mixed on a ring: replicas of different ranks stay the same bits.
#pragma once

#include "op/compressed_gossip.h"
#include "stress/checks.h"

namespace bagua::stress {

inline void replicas_are_the_neighbours_weights(Random& random, const Delays& delays) {
  const World world(random, 1, kPatient, {}, delays);
  const int64_t numel = between(random, 1, between(random, 0, 9) == 0 ? 1500000 : 5000);
  const int rounds = between(random, 1, 4);
  const std::vector<std::string> codecs = codec_names();
  const std::string codec = codecs[between(random, 0, static_cast<int>(codecs.size()) - 1)];
  std::vector<Replicas> replicas;
  for (int rank = 0; rank < world.ranks; ++rank) {
    const auto zeros = [&] { return at::empty({numel}).zero_(); };
    replicas.push_back({.own = zeros(), .left = zeros(), .right = zeros()});
  }
  const auto endings = run_ranks(world, [&](int rank) {
    CompressedGossip op(world.connect(world.places[0], rank), make_codec(codec),
                        std::make_shared<Scratch>(), replicas[rank],
                        {.left = 1.0 / 3, .right = 1.0 / 3});
    at::Tensor weights = at::empty({numel}).zero_();
    const std::string bucket = "stress";
    for (int round = 1; round <= rounds; ++round) {
      float* values = weights.data_ptr<float>();
      for (int64_t i = 0; i < numel; ++i) values[i] += value_of(rank, round, 0, i);
      op.run(weights, {.number = round, .grad_scale = 1.0f, .bucket = bucket});
      expect(world.ranks == 1 || same_bits(weights, replicas[rank].own),
             "the weights are not what the replica says");
    }
  });
  for (const Ending& ending : endings) expect(ending.error.empty(), ending.error);
  for (int rank = 0; rank < world.ranks; ++rank) {
    const int right = (rank + 1) % world.ranks;
    expect(same_bits(replicas[rank].right, replicas[right].own) &&
               same_bits(replicas[right].left, replicas[rank].own),
           "replicas of ranks ", rank, " and ", right, " differ (", codec, ")");
  }
}

}  // namespace bagua::stress
