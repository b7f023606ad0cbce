// The kernels of sparse messages against the CPU: every byte of a message, of what is left, and of
// the sum of several ranks.
#pragma once

#include <cmath>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <limits>
#include <string>
#include <vector>

#include "base/mixed_bits.h"
#include "codec/chunk_format.h"
#include "codec/index_code.h"
#include "codec/sparse_codec.h"
#include "kernels/sparse_reference.h"

namespace bagua {

struct SparsePattern {
  const char* name;
  double (*value)(uint64_t i);
};

inline constexpr SparsePattern kSparsePatterns[] = {
    {"few values", [](uint64_t i) { return static_cast<double>(mixed_bits(i) % 7) - 3.0; }},
    {"many values",
     [](uint64_t i) {
       const double sign = mixed_bits(~i) % 2 == 0 ? 1 : -1;
       return sign * std::exp2(static_cast<double>(mixed_bits(i) % 4096) / 256 - 8);
     }},
    {"one value", [](uint64_t) { return -0.25; }},
    {"zeros of both signs", [](uint64_t i) { return i % 3 == 0 ? -0.0 : 0.0; }},
    {"NaN and infinity",
     [](uint64_t i) {
       if (i % 5 == 1) return (i % 2 ? -1 : 1) * std::numeric_limits<double>::quiet_NaN();
       return i % 7 == 2 ? -std::numeric_limits<double>::infinity() : 1.0 / static_cast<double>(i);
     }},
};

inline SparseShape sparse_shape(int64_t numel, int64_t k, int64_t element_bytes) {
  return {.numel = numel,
          .k = k,
          .element_bytes = element_bytes,
          .coding = choose_index_coding(numel, k),
          .bits = static_cast<int>(bits_per_index(numel)),
          .values_bytes = align_payload(k * element_bytes),
          .indices_bytes = index_bytes(numel, k)};
}

// Messages of three ranks, first as they are, then with damage in rank 1's indices.
template <typename T>
class SparseComparison {
 public:
  SparseComparison(std::string name, const SparseCodec& cuda, const SparseShape& shape)
      : name_(std::move(name)), cuda_(cuda), shape_(shape), scratch_(scratch_words()) {}

  void compare(const SparsePattern& pattern) {
    const int64_t bytes = shape_.values_bytes + shape_.indices_bytes;
    // With space between the messages that nothing writes.
    const int64_t stride = bytes + 32;
    std::vector<std::byte> expected(kRanks * stride, std::byte{0x5a}), found = expected;
    for (int64_t rank = 0; rank < kRanks; ++rank) {
      std::vector<T> x(shape_.numel);
      for (int64_t i = 0; i < shape_.numel; ++i) {
        x[i] = static_cast<T>(pattern.value(rank * shape_.numel + i));
      }
      std::vector<T> left = x;
      cpu_.take(shape_, x.data(), expected.data() + rank * stride, nullptr, nullptr);
      cuda_.take(shape_, left.data(), found.data() + rank * stride, scratch(), nullptr);
      expect_equal("what is left", x, left);
    }
    expect_equal("messages", expected, found);
    sum(expected, stride);
    for (uint64_t seed = 0; seed < 3 && shape_.indices_bytes > 0; ++seed) {
      std::byte* const indices = expected.data() + stride + shape_.values_bytes;
      const uint64_t at = mixed_bits(seed) % static_cast<uint64_t>(shape_.indices_bytes);
      indices[at] ^= static_cast<std::byte>(1 + mixed_bits(seed + 1) % 255);
      sum(expected, stride);
    }
  }

 private:
  static constexpr int64_t kRanks = 3;

  int64_t scratch_words() const { return (cuda_.scratch_bytes(shape_, kRanks) + 7) / 8; }
  std::byte* scratch() { return reinterpret_cast<std::byte*>(scratch_.data()); }

  void sum(const std::vector<std::byte>& messages, int64_t stride) {
    const SparseMessages of_ranks{messages.data(), stride, kRanks};
    std::vector<T> expected(shape_.numel), found(shape_.numel, T{77});
    std::vector<int32_t> expected_faults(kRanks), found_faults(kRanks, 99);
    cpu_.add(shape_, of_ranks, expected.data(), expected_faults.data(), nullptr, nullptr);
    cuda_.add(shape_, of_ranks, found.data(), found_faults.data(), scratch(), nullptr);
    for (int32_t& count : found_faults) count = count > 0 ? 1 : 0;
    expect_equal("faults", expected_faults, found_faults);
    for (int64_t i = 0; i < shape_.numel; ++i) {  // the bits of a NaN depend on the device
      if (std::isnan(expected[i]) && std::isnan(found[i])) found[i] = expected[i];
    }
    expect_equal("sum", expected, found);
  }

  template <typename Value>
  void expect_equal(const char* what, const std::vector<Value>& expected,
                    const std::vector<Value>& found) const {
    for (size_t i = 0; i < expected.size(); ++i) {
      if (std::memcmp(&expected[i], &found[i], sizeof(Value)) != 0) fail(what, i);
    }
  }

  [[noreturn]] void fail(const char* what, size_t at) const {
    std::printf("sparse, %s, %ld of %ld elements of %ld bytes: %s differ at %zu\n", name_.c_str(),
                shape_.k, shape_.numel, shape_.element_bytes, what, at);
    std::exit(1);
  }

  const std::string name_;
  const SparseReference cpu_;
  const SparseCodec& cuda_;
  const SparseShape shape_;
  std::vector<uint64_t> scratch_;
};

// Tiles that are full, or not, of a few elements or none chosen; one, some, many and all.
inline void compare_sparse_messages(bool quick) {
  const auto cuda = make_cuda_sparse_codec();
  const std::vector<int64_t> sizes = quick ? std::vector<int64_t>{4096 + 7}
                                           : std::vector<int64_t>{1, 33, 4096, 2 * 4096 + 5, 20011};
  for (const SparsePattern& pattern : kSparsePatterns) {
    for (const int64_t numel : sizes) {
      for (const int64_t k : {int64_t{1}, numel / 100 + 1, numel / 2 + 1, numel}) {
        if (k > numel) continue;
        SparseComparison<float>(pattern.name, *cuda, sparse_shape(numel, k, 4)).compare(pattern);
        if (k != numel / 100 + 1) continue;
        SparseComparison<double>(pattern.name, *cuda, sparse_shape(numel, k, 8)).compare(pattern);
      }
    }
  }
  std::printf("sparse messages\n");
}

}  // namespace bagua
