// Numbers that kernels stumble over.
#pragma once

#include <cmath>
#include <cstdint>
#include <limits>
#include <span>
#include <string>
#include <vector>

#include "base/dtype.h"
#include "base/mixed_bits.h"

namespace bagua {

// Uniform in [0, 1).
inline float uniform(uint64_t number) {
  return static_cast<float>(mixed_bits(number) >> 40) * 0x1p-24f;
}

struct Pattern {
  const char* name;
  // Element i of numel, in a dtype with this largest number.
  float (*value)(int64_t i, int64_t numel, float largest);
};

// Random numbers whose scale changes from block to block.
inline float layers(int64_t i, int64_t, float) {
  const float scale = std::exp2(static_cast<float>(mixed_bits(i / 1500) % 24) - 14.0f);
  return scale * (uniform(i) + uniform(~i) - 1.0f);
}

inline constexpr Pattern kPatterns[] = {
    {"layers", layers},
    {"far from zero", [](int64_t i, int64_t, float) { return 60000.0f + uniform(i) * 0.5f; }},
    {"one NaN at the end",
     [](int64_t i, int64_t numel, float) {
       return i == numel - 1 ? std::numeric_limits<float>::quiet_NaN() : uniform(i);
     }},
    {"zeros of both signs", [](int64_t i, int64_t, float) { return i % 3 == 0 ? -0.0f : 0.0f; }},
    {"only negative zeros", [](int64_t, int64_t, float) { return -0.0f; }},
    {"negative zero smallest",
     [](int64_t i, int64_t, float) { return i % 2 == 0 ? -0.0f : uniform(i); }},
    {"a constant", [](int64_t, int64_t, float) { return 3.25f; }},
    {"a large constant", [](int64_t, int64_t, float largest) { return -largest; }},
    {"farther from zero", [](int64_t i, int64_t, float) { return 1e6f + uniform(i) * 8.0f; }},
    {"rather far from zero",
     [](int64_t i, int64_t, float) { return 100.0f + uniform(i) * 0.002f; }},
    {"as wide as the dtype",
     [](int64_t i, int64_t, float largest) { return largest * (uniform(i) * 2.0f - 1.0f); }},
    {"both largest numbers",
     [](int64_t i, int64_t, float largest) {
       return i % 3 == 0 ? largest : i % 3 == 1 ? -largest : uniform(i);
     }},
    {"near the largest number",
     [](int64_t i, int64_t, float largest) { return largest * (1.0f - uniform(i) * 0.4f); }},
    {"subnormal", [](int64_t i, int64_t, float) { return (uniform(i) - 0.5f) * 1e-38f; }},
    {"half's subnormals", [](int64_t i, int64_t, float) { return (uniform(i) - 0.5f) * 1e-4f; }},
    {"one NaN at the start",
     [](int64_t i, int64_t, float) {
       return i == 0 ? -std::numeric_limits<float>::quiet_NaN() : uniform(i);
     }},
    {"infinity in the middle",
     [](int64_t i, int64_t numel, float) {
       return i == numel / 2 ? std::numeric_limits<float>::infinity() : uniform(i);
     }},
    {"negative infinity only",
     [](int64_t, int64_t, float) { return -std::numeric_limits<float>::infinity(); }},
};

// Amount of input: all, what sanitizers need, what ThreadSanitizer needs.
enum class Inputs { kAll, kQuick, kRaces };

// The first three take the paths that numbers choose: plain, divided exactly, not finite.
inline std::span<const Pattern> patterns_of(Inputs inputs) {
  return std::span(kPatterns).first(inputs == Inputs::kRaces ? 3 : std::size(kPatterns));
}

template <typename T>
std::vector<T> filled(const Pattern& pattern, int64_t numel) {
  std::vector<T> x(numel);
  for (int64_t i = 0; i < numel; ++i) x[i] = narrow<T>(pattern.value(i, numel, kLargestFinite<T>));
  return x;
}

// Every number that has 16 bits, in T: of the type `Short`, or T's own if they are the same.
template <typename T, typename Short>
std::vector<T> all_numbers() {
  std::vector<T> x(1 << 16);
  for (uint32_t bits = 0; bits < 1 << 16; ++bits) {
    const Short number{static_cast<uint16_t>(bits)};
    if constexpr (std::is_same_v<T, Short>) {
      x[bits] = number;
    } else {
      x[bits] = narrow<T>(widen(number));
    }
  }
  return x;
}

}  // namespace bagua
