// Runs a batch of chunks through the CPU codec and the emulated CUDA codec and compares the bytes.
#pragma once

#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <memory>
#include <string>
#include <vector>

#include "base/dtype.h"
#include "codec/codec.h"

namespace bagua {

// Memory in which pieces lie at a chosen distance from a multiple of 32, with marked bytes around
// them: what is written beside a piece is found as well.
class Arena {
 public:
  explicit Arena(int64_t bytes)
      : bytes_(bytes),
        memory_(static_cast<std::byte*>(std::aligned_alloc(kAlignment, round_up(bytes)))) {
    std::memset(memory_.get(), kMark, bytes);
  }

  static int64_t room_for(int64_t bytes) { return round_up(bytes) + 2 * kAlignment; }

  std::byte* place(int64_t bytes, int64_t offset) {
    std::byte* begin = memory_.get() + used_ + offset;
    used_ += room_for(bytes);
    return begin;
  }

  const std::byte* begin() const { return memory_.get(); }
  int64_t bytes() const { return bytes_; }

 private:
  static constexpr int64_t kAlignment = 32;
  static constexpr int kMark = 0xa5;
  static int64_t round_up(int64_t bytes) { return (bytes + kAlignment) / kAlignment * kAlignment; }

  struct Free {
    void operator()(std::byte* memory) const { std::free(memory); }
  };
  int64_t bytes_;
  std::unique_ptr<std::byte, Free> memory_;
  int64_t used_ = 0;
};

// Where x and payloads start, in bytes behind a multiple of 32.
struct Offsets {
  int64_t x = 0;
  int64_t payload = 0;
};

template <typename T>
using Batch = std::vector<std::vector<T>>;

template <typename T>
inline constexpr DType kDTypeOf = DType::kFloat32;
template <>
inline constexpr DType kDTypeOf<Half> = DType::kFloat16;
template <>
inline constexpr DType kDTypeOf<BFloat16> = DType::kBFloat16;

[[noreturn]] inline void report_difference(const std::string& what, int64_t at, uint64_t cpu,
                                           uint64_t cuda) {
  std::printf("%s: position %lld: the CPU has %llx, the kernel %llx\n", what.c_str(),
              static_cast<long long>(at), static_cast<unsigned long long>(cpu),
              static_cast<unsigned long long>(cuda));
  std::exit(1);
}

// One side of a comparison: a codec with separate memory.
template <typename T>
struct Side {
  const Codec& codec;
  Arena payloads;
  Arena decoded;
  Arena sums;
  std::vector<Chunk> chunks;

  Side(const Codec& side, const Batch<T>& batch, Offsets offsets)
      : codec(side),
        payloads(room(batch, [&](int64_t numel) { return payload_bytes(numel); })),
        decoded(room(batch, [](int64_t numel) { return numel * int64_t{sizeof(T)}; })),
        sums(room(batch, [](int64_t numel) { return numel * int64_t{sizeof(float)}; })) {
    for (const std::vector<T>& x : batch) {
      const int64_t numel = static_cast<int64_t>(x.size());
      chunks.push_back({nullptr, payloads.place(payload_bytes(numel), offsets.payload), numel});
    }
  }

  int64_t payload_bytes(int64_t numel) const { return codec.payload_bytes(kDTypeOf<T>, numel); }

  template <typename Bytes>
  static int64_t room(const Batch<T>& batch, Bytes&& bytes) {
    int64_t sum = 0;
    for (const std::vector<T>& x : batch) sum += Arena::room_for(bytes(int64_t(x.size())));
    return sum;
  }

  void encode(const std::vector<Chunk>& inputs) {
    std::vector<Chunk> filled = chunks;
    for (size_t i = 0; i < filled.size(); ++i) filled[i].x = inputs[i].x;
    // Its start is all that scratch may rely on: nothing in it is initialised.
    const std::vector<uint64_t> scratch(codec.scratch_bytes(filled, kDTypeOf<T>) / 8 + 1, ~0ull);
    codec.encode(filled, kDTypeOf<T>,
                 reinterpret_cast<std::byte*>(const_cast<uint64_t*>(scratch.data())), nullptr);
  }

  void decode(Offsets offsets) {
    for (Chunk& chunk : chunks) {
      chunk.x = decoded.place(chunk.numel * int64_t{sizeof(T)}, offsets.x);
    }
    codec.decode(chunks, kDTypeOf<T>, nullptr);
  }

  void decode_add(Offsets offsets, float weight) {
    for (Chunk& chunk : chunks) {
      float* sum = reinterpret_cast<float*>(
          sums.place(chunk.numel * int64_t{sizeof(float)}, offsets.x / int64_t{sizeof(T)} * 4));
      for (int64_t i = 0; i < chunk.numel; ++i) sum[i] = 0.3f - 0.01f * static_cast<float>(i % 97);
      chunk.x = sum;
    }
    codec.decode_add(chunks, kDTypeOf<T>, weight, nullptr);
  }

  // Of float elements, where decode_add has put its sums.
  void encode_residual(const std::vector<Chunk>& inputs) {
    for (size_t i = 0; i < chunks.size(); ++i) {
      if (chunks[i].numel > 0) std::memcpy(chunks[i].x, inputs[i].x, chunks[i].numel * sizeof(T));
    }
    std::vector<uint64_t> scratch(codec.scratch_bytes(chunks, kDTypeOf<T>) / 8 + 1, ~0ull);
    codec.encode_residual(chunks, reinterpret_cast<std::byte*>(scratch.data()), nullptr);
  }
};

// Any NaN is equal to any other if `any_nan`.
template <typename Element>
void compare(const std::string& what, const Arena& cpu, const Arena& cuda, bool any_nan) {
  if (std::memcmp(cpu.begin(), cuda.begin(), cpu.bytes()) == 0) return;
  const int64_t count = cpu.bytes() / int64_t{sizeof(Element)};
  for (int64_t i = 0; i < count; ++i) {
    Element elements[2];
    std::memcpy(&elements[0], cpu.begin() + i * sizeof(Element), sizeof(Element));
    std::memcpy(&elements[1], cuda.begin() + i * sizeof(Element), sizeof(Element));
    uint64_t bits[2] = {};
    std::memcpy(&bits[0], &elements[0], sizeof(Element));
    std::memcpy(&bits[1], &elements[1], sizeof(Element));
    if (bits[0] == bits[1]) continue;
    if constexpr (!std::is_same_v<Element, std::byte>) {
      const float values[2] = {widen(elements[0]), widen(elements[1])};
      if (any_nan && values[0] != values[0] && values[1] != values[1]) continue;
    }
    report_difference(what, i, bits[0], bits[1]);
  }
}

// Encodes, decodes and adds the batch on both sides, and f32 with residuals; ends the program at
// the first difference.
template <typename T>
void compare_codecs(const std::string& what, const Codec& cpu_codec, const Codec& cuda_codec,
                    const Batch<T>& batch, Offsets offsets) {
  Arena x(Side<T>::room(batch, [](int64_t numel) { return numel * int64_t{sizeof(T)}; }));
  std::vector<Chunk> inputs;
  for (const std::vector<T>& each : batch) {
    std::byte* begin = x.place(each.size() * sizeof(T), offsets.x);
    if (!each.empty()) std::memcpy(begin, each.data(), each.size() * sizeof(T));
    inputs.push_back({begin, nullptr, static_cast<int64_t>(each.size())});
  }
  Side<T> cpu(cpu_codec, batch, offsets);
  Side<T> cuda(cuda_codec, batch, offsets);
  cpu.encode(inputs);
  cuda.encode(inputs);
  compare<std::byte>(what + ", encode", cpu.payloads, cuda.payloads, false);
  cpu.decode(offsets);
  cuda.decode(offsets);
  compare<T>(what + ", decode", cpu.decoded, cuda.decoded, false);
  cpu.decode_add(offsets, 0.37f);
  cuda.decode_add(offsets, 0.37f);
  compare<float>(what + ", decode_add", cpu.sums, cuda.sums, true);
  if constexpr (std::is_same_v<T, float>) {
    cpu.encode_residual(inputs);
    cuda.encode_residual(inputs);
    compare<std::byte>(what + ", encode_residual, payloads", cpu.payloads, cuda.payloads, false);
    compare<float>(what + ", encode_residual, x", cpu.sums, cuda.sums, true);
  }
}

}  // namespace bagua
