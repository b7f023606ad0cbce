// Compares the fused kernels of all codecs with their steps one by one. Included by kernels.cpp.
#pragma once

#include <array>
#include <cstdio>
#include <cstring>
#include <functional>
#include <memory>
#include <string>
#include <vector>

#include "codec/chunk_codec_cpu.h"
#include "codec/cuda/chunk_codec_cuda.h"
#include "kernels/comparison.h"
#include "kernels/data.h"
#include "kernels/fused_reference.h"

namespace bagua {

// A bucket that is cut into chunks, rows of payloads for them, and three arrays beside it.
template <typename T>
struct FusedSide {
  static constexpr int kRows = 5;
  static constexpr int64_t kMargin = 64;

  const FusedCodec& fused;
  Arena x, arrays, payloads;
  std::vector<Chunk> chunks;
  std::array<std::byte*, kRows> rows;
  std::array<float*, 3> replicas;
  int64_t row_bytes = 0;
  struct alignas(16) Aligned {
    std::byte bytes[16] = {std::byte{0xff}, std::byte{0xff}, std::byte{0xff}, std::byte{0xff}};
  };
  std::vector<Aligned> work;

  // Offsets: of x in bytes, of the arrays and of the payloads.
  FusedSide(const FusedCodec& of, const Codec& cpu, const std::vector<int64_t>& sizes,
            const std::vector<std::vector<float>>& values, Offsets offsets)
      : fused(of),
        x(Arena::room_for(total(sizes) * sizeof(T))),
        arrays(3 * Arena::room_for(total(sizes) * sizeof(float))),
        payloads(kRows * Arena::room_for(bytes(cpu, sizes) + kMargin)) {
    const int64_t numel = total(sizes);
    T* const first = reinterpret_cast<T*>(x.place(numel * sizeof(T), offsets.x));
    for (int64_t i = 0; i < numel; ++i) first[i] = narrow<T>(values[0][i]);
    for (int a = 0; a < 3; ++a) {
      const int64_t offset = offsets.x / int64_t{sizeof(T)} * 4;
      replicas[a] = reinterpret_cast<float*>(arrays.place(numel * sizeof(float), offset));
      std::memcpy(replicas[a], values[1 + a].data(), numel * sizeof(float));
    }
    row_bytes = Arena::room_for(bytes(cpu, sizes) + kMargin);
    for (std::byte*& row : rows) row = payloads.place(bytes(cpu, sizes) + kMargin, offsets.payload);
    int64_t element = 0, byte = 32;
    for (const int64_t size : sizes) {
      chunks.push_back({first + element, rows[0] + byte, size});
      element += size;
      byte += most_bytes(cpu, size);
    }
  }

  // Rows r > 0 hold versions of x that were encoded as `dtype`: x, shifted.
  void fill_rows(const Codec& cpu, DType dtype, const std::vector<std::vector<float>>& values) {
    for (int row = 1; row < kRows; ++row) fill_row(row, cpu, dtype, values);
  }
  void fill_row(int row, const Codec& cpu, DType dtype,
                const std::vector<std::vector<float>>& values) {
    int64_t element = 0;
    for (const Chunk& chunk : chunks) {
      visit_dtype(dtype, [&]<typename Wire>(Wire) {
        std::vector<Wire> version(chunk.numel);
        for (int64_t i = 0; i < chunk.numel; ++i) {
          version[i] = narrow<Wire>(values[row % values.size()][element + i]);
        }
        const Chunk encoded{version.data(), rows[row] + (chunk.payload - rows[0]), chunk.numel};
        cpu.encode({&encoded, 1}, dtype, nullptr, nullptr);
      });
      element += chunk.numel;
    }
  }

  // Its start is all that scratch may rely on: nothing in it is initialised.
  std::byte* scratch(DType dtype) {
    work.assign(fused.scratch_bytes(chunks, dtype) / 16 + 1, Aligned{});
    return work.data()->bytes;
  }

  ThreeArrays three() const { return {chunks[0].x, replicas[0], replicas[1], replicas[2]}; }

  static int64_t most_bytes(const Codec& cpu, int64_t size) {
    return std::max(cpu.payload_bytes(kDTypeOf<T>, size), cpu.payload_bytes(DType::kFloat32, size));
  }
  static int64_t total(const std::vector<int64_t>& sizes) {
    int64_t sum = 0;
    for (const int64_t size : sizes) sum += size;
    return sum;
  }
  static int64_t bytes(const Codec& cpu, const std::vector<int64_t>& sizes) {
    int64_t sum = 0;
    for (const int64_t size : sizes) sum += most_bytes(cpu, size);
    return sum;
  }
};

// Runs `step` on both sides and compares all memory.
template <typename T>
void compare_step(const std::string& what, FusedSide<T>& steps, FusedSide<T>& kernel,
                  const std::function<void(FusedSide<T>&)>& step) {
  step(steps);
  step(kernel);
  compare<std::byte>(what + ", payloads", steps.payloads, kernel.payloads, false);
  compare<T>(what + ", x", steps.x, kernel.x, true);
  compare<float>(what + ", arrays", steps.arrays, kernel.arrays, true);
}

template <typename T>
void compare_fused_steps(const std::string& what, const Codec& cpu, const FusedCodec& kernels,
                         const std::vector<int64_t>& sizes,
                         const std::vector<std::vector<float>>& values, Offsets offsets) {
  const FusedReference reference(make_cpu_codec(cpu.name()));
  const auto both = [&](const std::string& step, DType wire,
                        const std::function<void(FusedSide<T>&)>& run) {
    FusedSide<T> steps(reference, cpu, sizes, values, offsets);
    FusedSide<T> kernel(kernels, cpu, sizes, values, offsets);
    steps.fill_rows(cpu, wire, values);
    kernel.fill_rows(cpu, wire, values);
    compare_step<T>(what + ", " + step, steps, kernel, run);
  };
  for (const int own : {0, 2, 3}) {
    // Versions are in the rows 1 to 4 of the memory; row 0 takes the results.
    both("encode_sum, own row " + std::to_string(own), kDTypeOf<T>, [&](FusedSide<T>& side) {
      const int rows = own == 0 ? 1 : 4;
      const PayloadVersions versions{side.rows[0], side.rows[1], side.row_bytes, rows, own};
      // Three is not a power of two: its reciprocal would give other bits.
      const float divisor = own == 0 ? 1.0f : 3.0f;
      side.fused.encode_sum(side.chunks, versions, divisor, kDTypeOf<T>, side.scratch(kDTypeOf<T>),
                            nullptr);
    });
  }
  for (const int own : {0, 2, 3}) {
    both("sum, own row " + std::to_string(own), kDTypeOf<T>, [&](FusedSide<T>& side) {
      const int rows = own == 0 ? 1 : 4;
      const PayloadVersions versions{side.rows[0], side.rows[1], side.row_bytes, rows, own};
      side.fused.sum(side.chunks, versions, {.divisor = 3.0f, .factor = own == 2 ? 0.7f : 1.0f},
                     kDTypeOf<T>, nullptr);
    });
  }
  if constexpr (std::is_same_v<T, float>) {
    for (const int own : {0, 2, 3}) {
      both("encode_sum_residual, own row " + std::to_string(own), DType::kFloat32,
           [&](FusedSide<T>& side) {
             const int rows = own == 0 ? 1 : 4;
             const PayloadVersions versions{side.rows[0], side.rows[1], side.row_bytes, rows, own};
             side.fill_row(0, cpu, DType::kFloat32, values);
             side.fused.encode_sum_residual(
                 side.chunks, versions, own == 0 ? 1.0f : 3.0f,
                 {static_cast<float*>(side.chunks[0].x), side.replicas[0], side.replicas[1]},
                 side.scratch(DType::kFloat32), nullptr);
           });
    }
  }
  both("encode_combined", DType::kFloat32, [](FusedSide<T>& side) {
    const ThreeWeights weights{1.0f + 0.3f + 0.2f, 0.3f, 0.2f};
    side.fused.encode_combined(side.chunks, side.three(), weights, kDTypeOf<T>,
                               side.scratch(kDTypeOf<T>), nullptr);
  });
  for (const int right : {2, 3}) {  // two ranks have one neighbour
    both("decode_add_three", DType::kFloat32, [&](FusedSide<T>& side) {
      const ThreeWeights weights{1.5f, 0.3f, 0.2f};
      side.fused.encode_combined(side.chunks, side.three(), weights, kDTypeOf<T>,
                                 side.scratch(kDTypeOf<T>), nullptr);
      side.fused.decode_add_three(side.chunks, side.three(),
                                  {side.rows[0], side.rows[2], side.rows[right]}, kDTypeOf<T>,
                                  nullptr);
    });
  }
}

// Patterns for x, and for the three arrays what keeps sums in range.
inline std::vector<std::vector<float>> fused_values(const Pattern& pattern, int64_t numel,
                                                    float largest) {
  std::vector<std::vector<float>> values(4, std::vector<float>(numel));
  for (int64_t i = 0; i < numel; ++i) {
    values[0][i] = pattern.value(i, numel, largest);
    values[1][i] = layers(i + 77, numel, largest);
    values[2][i] = pattern.value(numel - 1 - i, numel, largest);
    values[3][i] = uniform(5 * i) - 0.5f;
  }
  return values;
}

// encode_sum of one chunk of `numel` elements.
inline void compare_large_sum(const Codec& cpu, const FusedCodec& kernels, int64_t numel) {
  const FusedReference reference(make_cpu_codec(cpu.name()));
  const auto values = fused_values(kPatterns[0], numel, kLargestFinite<Half>);
  FusedSide<Half> steps(reference, cpu, {numel}, values, {0, 0});
  FusedSide<Half> kernel(kernels, cpu, {numel}, values, {0, 0});
  steps.fill_rows(cpu, DType::kFloat16, values);
  kernel.fill_rows(cpu, DType::kFloat16, values);
  compare_step<Half>(cpu.name() + ", a large sum", steps, kernel, [](FusedSide<Half>& side) {
    const PayloadVersions versions{side.rows[0], side.rows[1], side.row_bytes, 2, 1};
    side.fused.encode_sum(side.chunks, versions, 3.0f, DType::kFloat16,
                          side.scratch(DType::kFloat16), nullptr);
  });
}

// Compares all steps; the number of comparisons.
template <typename T>
int64_t compare_fused(const std::string& codec, Inputs inputs) {
  const auto cpu = make_cpu_codec(codec);
  const auto cuda = make_cuda_codec(codec);
  if (cuda->fused() == nullptr) return 0;
  int64_t compared = 0;
  const auto compare_sizes = [&](const Pattern& pattern, const std::vector<int64_t>& sizes,
                                 Offsets offsets) {
    const auto values = fused_values(pattern, FusedSide<T>::total(sizes), kLargestFinite<T>);
    const std::string what = codec + ", " + dtype_name(kDTypeOf<T>) + ", " + pattern.name +
                             ", first of " + std::to_string(sizes[0]);
    compare_fused_steps<T>(what, *cpu, *cuda->fused(), sizes, values, offsets);
    ++compared;
  };
  const int64_t one = sizeof(T);
  std::vector<int64_t> sizes = {1, 129, 2047};
  if (inputs == Inputs::kAll) sizes = {1, 3, 31, 127, 129, 2047, 2048, 2049};
  for (const Offsets offsets : {Offsets{0, 0}, {one, 0}, {0, 4}}) {
    for (const int64_t size : sizes) compare_sizes(kPatterns[0], {size}, offsets);
    compare_sizes(kPatterns[0], {4096, 2048, 4096 + 37}, offsets);
  }
  if (inputs == Inputs::kAll) compare_sizes(kPatterns[0], {131072, 3}, {0, 0});
  for (const Pattern& pattern : patterns_of(inputs)) {
    compare_sizes(pattern, {4096, 2048 + 31}, {0, 0});
  }
  compare_sizes(kPatterns[0], std::vector<int64_t>(130, 17), {0, 0});
  return compared;
}

}  // namespace bagua
