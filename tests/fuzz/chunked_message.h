// Chunked sparse messages, as other ranks may send them.
#pragma once

#include <algorithm>
#include <cstring>
#include <memory>
#include <vector>

#include <ATen/ops/zeros.h>

#include "base/check.h"
#include "hostile.h"
#include "op/outer/chunked_sparse.h"
#include "op/wire/chunked_message.h"

namespace bagua::fuzz {

inline constexpr int64_t kMostChunkedNumel = 2 * kSparseChunkNumel + 100;

// Whatever a message holds, a chunk of it is refused and changes nothing, or adds to k elements.
inline void chunked_message(Input input) {
  const int64_t numel = 1 + input.up_to(kMostChunkedNumel - 1);
  const int64_t k = 1 + input.up_to(kSparseChunkNumel - 1);
  const ChunkedMessage layout(numel, k);
  const auto bytes = exactly<std::byte>(layout.bytes());
  input.take_into(bytes.get(), layout.bytes());
  const auto sum = exactly<float>(numel);
  std::fill_n(sum.get(), numel, 0.0f);
  for (int64_t chunk = 0; chunk < layout.chunks(); ++chunk) {
    bool added = true;
    try {
      layout.add(chunk, bytes.get(), sum.get());
    } catch (const Error&) {
      added = false;
    }
    const int64_t first = chunk * kSparseChunkNumel;
    const int64_t end = std::min(numel, first + kSparseChunkNumel);
    const auto changed = std::count_if(sum.get() + first, sum.get() + end,
                                       [](float value) { return !(value == 0.0f); });
    FUZZ_REQUIRE(changed <= (added ? k : 0));
    const bool others = std::any_of(sum.get() + end, sum.get() + numel,
                                    [](float value) { return !(value == 0.0f); });
    FUZZ_REQUIRE(!others);
  }
}

inline std::vector<Bytes> chunked_messages() {
  std::vector<Bytes> result;
  for (const int64_t numel : {1, 700, 4096, 5000}) {
    for (const int64_t k : {1, 64, 300, 1000, 4096}) {
      const auto x = exactly<float>(numel);
      for (int64_t i = 0; i < numel; ++i) x[i] = static_cast<float>(i * 7919 % 101) - 50;
      const ChunkedMessage layout(numel, k);
      const auto message = exactly<std::byte>(layout.bytes());
      std::memset(message.get(), 0, kFrameBytes);
      for (int64_t chunk = 0; chunk < layout.chunks(); ++chunk) {
        layout.take(chunk, x.get(), message.get());
      }
      layout.write_padding(message.get());
      result.push_back(
          Example().up_to(numel - 1).up_to(k - 1).put_from(message.get(), layout.bytes()));
    }
  }
  return result;
}

inline void chunked_op(Input input) {
  const int64_t numel = 1 + input.up_to(kMostChunkedNumel - 1);
  const int64_t k = 1 + input.up_to(kSparseChunkNumel - 1);
  const auto checksum = static_cast<Checksum>(input.take<uint8_t>() % 2);
  const auto communicator = std::make_shared<HostileCommunicator>(Group{1, 3}, input);
  const std::vector<at::Tensor> nothing_owed{at::zeros({numel}, at::kFloat),
                                             at::zeros({1}, at::kLong)};
  const auto memory = std::make_shared<RoundMemory>(nothing_owed, std::make_shared<RoundOutcome>());
  ChunkedSparse op(communicator, std::make_shared<Scratch>(),
                   {.k = k, .decay = 0.9, .numel = numel}, memory, checksum);
  run(op, numel, *communicator, checksum);
}

inline std::vector<Bytes> chunked_ops() {
  std::vector<Bytes> result;
  for (const uint8_t checksum : {0, 1}) {
    for (const uint8_t changes : {0, 1, 2}) {
      result.push_back(
          Example().up_to(4999).up_to(63).put(checksum).put(changes).up_to(40).put(uint8_t{1}));
    }
  }
  return result;
}

}  // namespace bagua::fuzz
