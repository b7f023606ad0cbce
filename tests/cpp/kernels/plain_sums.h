// Compares the kernel that adds rows of plain elements with loops. Included by kernels.cpp.
#pragma once

#include <cstring>
#include <memory>
#include <string>
#include <vector>

#include "codec/plain_sum.h"
#include "kernels/comparison.h"
#include "kernels/data.h"
#include "kernels/fused_reference.h"

namespace bagua {

// A rank's shares, and the other ranks' versions of them: by share, then by rank.
template <typename T>
struct PlainSide {
  Arena x, versions;
  std::vector<Chunk> chunks;
  PayloadVersions rows;

  // `stride`: elements between versions. Offsets in bytes: of x and of the versions.
  PlainSide(const Pattern& pattern, const std::vector<int64_t>& sizes, int64_t stride, int ranks,
            int own, Offsets offsets)
      : x(sizes.size() * Arena::room_for(stride * sizeof(T))),
        versions(Arena::room_for(sizes.size() * ranks * stride * sizeof(T))) {
    const auto numel = static_cast<int64_t>(sizes.size()) * ranks * stride;
    std::byte* const first = versions.place(numel * sizeof(T), offsets.payload);
    const std::vector<T> values = filled<T>(pattern, numel);
    std::memcpy(first, values.data(), numel * sizeof(T));
    const auto row_bytes = stride * static_cast<int64_t>(sizeof(T));
    rows = {.results = first, .first = first, .stride = row_bytes, .rows = ranks, .own = own};
    for (size_t share = 0; share < sizes.size(); ++share) {
      std::byte* const mine = x.place(sizes[share] * sizeof(T), offsets.x);
      std::memcpy(mine, &values[share * 13], sizes[share] * sizeof(T));
      chunks.push_back({mine, first + share * ranks * row_bytes, sizes[share]});
    }
  }
};

template <typename T>
void compare_plain_sums(Inputs inputs) {
  const auto kernel = make_cuda_plain_sum();
  const PlainSumReference reference;
  const auto compare_one = [&](const Pattern& pattern, const std::vector<int64_t>& sizes, int ranks,
                               int own, Offsets offsets) {
    const int64_t stride = (sizes[0] + 15) / 16 * 16;
    PlainSide<T> steps(pattern, sizes, stride, ranks, own, offsets);
    PlainSide<T> device(pattern, sizes, stride, ranks, own, offsets);
    // Three is not a power of two: its reciprocal would give other bits.
    const SumScale scale{.divisor = 3.0f, .factor = 0.7f};
    reference.sum(steps.chunks, steps.rows, scale, kDTypeOf<T>, nullptr);
    kernel->sum(device.chunks, device.rows, scale, kDTypeOf<T>, nullptr);
    const std::string what = std::string("plain sum, ") + dtype_name(kDTypeOf<T>) + ", " +
                             pattern.name + ", first of " + std::to_string(sizes[0]);
    compare<T>(what + ", x", steps.x, device.x, true);
    compare<std::byte>(what + ", versions", steps.versions, device.versions, false);
  };
  const int64_t one = sizeof(T);
  for (const Offsets offsets : {Offsets{0, 0}, {one, 0}, {0, one}}) {
    for (const int64_t size : {1, 2047, 2048, 4096 + 37}) {
      compare_one(kPatterns[0], {size}, 4, 2, offsets);
    }
    compare_one(kPatterns[0], {4096, 4096, 17, 0}, 3, 0, offsets);
  }
  compare_one(kPatterns[0], {2048}, 1, 0, {});
  for (const Pattern& pattern : patterns_of(inputs)) compare_one(pattern, {2048 + 31}, 8, 7, {});
}

}  // namespace bagua
