// Runs the CUDA kernels on the CPU (cuda_emulation.h) and compares every byte with the CPU codecs,
// and low-rank products with plain loops. Prints what it ran; ends with status 1 and details at the
// first difference.
//
//   kernels [--quick | --races] [--every-dtype] [--skip-barrier N]
//
// --quick: fewer sizes, and one of the two dtypes of two bytes, for sanitizers. --races: also few
// patterns, for ThreadSanitizer: races depend on sizes and alignment, numbers choose between few
// paths. --every-dtype: all of them with few sizes too, so that every kernel runs. --skip-barrier:
// see cuda_emulation.h.
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <memory>
#include <span>
#include <string>
#include <vector>

#include "base/launch.h"
#include "codec/chunk_codec_cpu.h"
#include "codec/codecs.h"
#include "codec/cuda/chunk_codec_cuda.h"
#include "codec/exact_division.h"
#include "comm/nccl/fill_if_set.cuh"
#include "emulation/cuda_emulation.h"
#include "kernels/comparison.h"
#include "kernels/data.h"
#include "kernels/frames.h"
#include "kernels/fused.h"
#include "kernels/low_rank.h"
#include "kernels/plain_sums.h"
#include "kernels/sparse.h"

namespace bagua {

namespace {

constexpr Offsets kNoOffsets{};
int64_t batches_compared = 0;

struct Pair {
  std::shared_ptr<const Codec> cpu;
  std::shared_ptr<const Codec> cuda;
  std::string name;

  template <typename T>
  void compare(const std::string& what, const Batch<T>& batch, Offsets offsets) const {
    ++batches_compared;
    compare_codecs<T>(name + ", " + what, *cpu, *cuda, batch, offsets);
  }
};

// Sizes around every unit of work, at every alignment.
template <typename T>
void compare_sizes(const Pair& pair, Inputs inputs) {
  std::vector<int64_t> sizes = {0,        1,    3,    31,   32,        127,      129,
                                256 + 35, 2047, 2048, 2049, 4096 + 37, 16384 + 1};
  if (inputs == Inputs::kAll) sizes.insert(sizes.end(), {8 * 2048, 5 * 2048 + 8, 131072 + 17});
  const int64_t one = sizeof(T);
  const std::vector<Offsets> all_offsets = {{0, 0}, {one, 0}, {16, 16}, {0, 4}, {8, 8}, {16, 28}};
  for (const int64_t size : sizes) {
    const Batch<T> batch = {filled<T>(kPatterns[0], size)};
    // Two tiles and a part have every path of a tile at each alignment.
    const bool few = inputs != Inputs::kAll && size != 4096 + 37;
    for (const Offsets offsets : std::span(all_offsets).first(few ? 2 : all_offsets.size())) {
      pair.compare("numel " + std::to_string(size) + ", offsets " + std::to_string(offsets.x) +
                       " and " + std::to_string(offsets.payload),
                   batch, offsets);
    }
  }
}

template <typename T>
void compare_patterns(const Pair& pair, Inputs inputs) {
  for (const Pattern& pattern : patterns_of(inputs)) {
    Batch<T> batch = {filled<T>(pattern, 1), filled<T>(pattern, 2048 + 31)};
    if (inputs == Inputs::kAll) batch.push_back(filled<T>(pattern, 3 * 2048 + 7));
    pair.compare(pattern.name, batch, kNoOffsets);
    pair.compare(pattern.name, batch, {sizeof(T), 4});
  }
  if (inputs == Inputs::kRaces) return;
  Batch<T> numbers = {all_numbers<T, Half>(), all_numbers<T, BFloat16>()};
  if (inputs == Inputs::kQuick) numbers.pop_back();
  pair.compare("all numbers of 16 bits", numbers, kNoOffsets);
}

// Many chunks a call, of all sizes and none: more than one launch holds.
template <typename T>
void compare_many_chunks(const Pair& pair, Inputs inputs) {
  Batch<T> batch;
  for (int i = 0; i < (inputs == Inputs::kAll ? 300 : 130); ++i) {
    const int64_t numel = i % 5 == 4 ? 0 : i % 41 == 0 ? 4096 + i : (i * 37) % 199;
    batch.push_back(filled<T>(kPatterns[i % 2 == 0 ? 0 : 9], numel));
  }
  pair.compare("many chunks", batch, kNoOffsets);
  pair.compare("empty chunks", Batch<T>(250), kNoOffsets);
  pair.compare("no chunks", Batch<T>(), kNoOffsets);
}

// Bytes that no encoder wrote decode to something, and to the same on both sides, NaN aside.
template <typename T>
void compare_strange_payloads(const Pair& pair, Inputs inputs) {
  const Batch<T> batch = {std::vector<T>(3 * 2048 + 5)};
  Side<T> cpu(*pair.cpu, batch, kNoOffsets);
  Side<T> cuda(*pair.cuda, batch, kNoOffsets);
  for (uint64_t seed = 0; seed < (inputs == Inputs::kAll ? 20 : 2); ++seed) {
    const int64_t bytes = cpu.payload_bytes(cpu.chunks[0].numel);
    for (int64_t i = 0; i < bytes; ++i) {
      cpu.chunks[0].payload[i] = cuda.chunks[0].payload[i] =
          static_cast<std::byte>(mixed_bits(seed * bytes + i));
    }
    Side<T> fresh_cpu(*pair.cpu, batch, kNoOffsets);
    Side<T> fresh_cuda(*pair.cuda, batch, kNoOffsets);
    fresh_cpu.chunks[0].payload = cpu.chunks[0].payload;
    fresh_cuda.chunks[0].payload = cuda.chunks[0].payload;
    fresh_cpu.decode(kNoOffsets);
    fresh_cuda.decode(kNoOffsets);
    compare<T>(pair.name + ", strange payload", fresh_cpu.decoded, fresh_cuda.decoded, true);
  }
}

// More tiles than a chunk has slices: each slice then has several rounds.
void compare_large_chunk(const Pair& pair) {
  constexpr int64_t kNumel = 8 * 1024 * 2048 + 3 * 2048 + 5;
  pair.compare("a large chunk", Batch<Half>{filled<Half>(kPatterns[0], kNumel)}, kNoOffsets);
  compare_large_sum(*pair.cpu, *pair.cuda->fused(), kNumel);
}

// A raised flag sets every byte of the data and no other; a flag that is not raised sets none.
void fill_data_if_the_flag_is_set() {
  emulation::load(reinterpret_cast<const void*>(&fill_bytes_if_set));  // as make_device_flag() does
  for (const int64_t bytes : {0, 1, 511, 512, 513, 32 * 512, 70 * 512 + 3}) {
    for (const uint32_t flag : {0u, 1u}) {
      const int64_t margin = 3;
      std::vector<std::byte> memory(bytes + 2 * margin, std::byte{0x5a});
      launch("fill_bytes_if_set", fill_bytes_if_set, fill_grid(bytes), kFillThreads, nullptr, &flag,
             memory.data() + margin, bytes);
      for (int64_t i = 0; i < static_cast<int64_t>(memory.size()); ++i) {
        const bool inside = i >= margin && i < margin + bytes;
        if (memory[i] == std::byte{inside && flag ? uint8_t{0xff} : uint8_t{0x5a}}) continue;
        std::printf("fill_bytes_if_set, %ld bytes, flag %u: byte %ld is wrong\n", bytes, flag, i);
        std::exit(1);
      }
    }
  }
}

// codec/exact_division.h against division itself.
void compare_divisions(int64_t ranges) {
  for (int64_t i = 0; i < ranges; ++i) {
    const float scale = std::exp2(static_cast<float>(mixed_bits(i) % 100) - 60.0f);
    const float shift = i % 2 == 0 ? 0.0f : scale * 4000.0f * uniform(3 * i);
    const float min = shift - scale * uniform(5 * i);
    const ValueRange range{min, min + scale * (uniform(7 * i) + 0.001f)};
    const QuantisationGrid grid = quantisation_grid(range);
    const PlainDequantiser<MinmaxUint8, float> plain(grid);
    if (!plain.plain) continue;
    for (int code = 0; code < 256; ++code) {
      const float wanted = MinmaxUint8::dequantise<float>(static_cast<uint8_t>(code), grid);
      const float got = plain(static_cast<uint8_t>(code));
      if (float_to_bits(wanted) != float_to_bits(got)) {
        std::printf("range %a to %a, code %d: division gives %a, divide %a\n", range.min, range.max,
                    code, wanted, got);
        std::exit(1);
      }
    }
  }
  for (int64_t i = 0; i < ranges * 256; ++i) {
    const float divisor = bits_to_float(0x3f800000 + (mixed_bits(i) & 0x7fffff));
    const float dividend = static_cast<float>(mixed_bits(~i) & 0xffffff);
    const float got = divide(dividend, make_divisor(divisor));
    if (float_to_bits(dividend / divisor) != float_to_bits(got)) {
      std::printf("%a / %a is %a, divide gives %a\n", dividend, divisor, dividend / divisor, got);
      std::exit(1);
    }
  }
  std::printf("division: %lld ranges\n", static_cast<long long>(ranges));
}

template <typename T>
void compare_all(const std::string& codec, Inputs inputs) {
  const Pair pair{make_cpu_codec(codec), make_cuda_codec(codec),
                  codec + ", " + dtype_name(kDTypeOf<T>)};
  const int64_t before = batches_compared;
  compare_sizes<T>(pair, inputs);
  compare_patterns<T>(pair, inputs);
  compare_many_chunks<T>(pair, inputs);
  compare_strange_payloads<T>(pair, inputs);
  if constexpr (std::is_same_v<T, Half>) {
    if (inputs == Inputs::kAll && pair.cuda->block_numel() == 0) compare_large_chunk(pair);
  }
  std::printf("%s: %lld batches, %lld of fused steps\n", pair.name.c_str(),
              static_cast<long long>(batches_compared - before),
              static_cast<long long>(compare_fused<T>(codec, inputs)));
}

}  // namespace

}  // namespace bagua

int main(int argc, char** argv) {
  bagua::Inputs inputs = bagua::Inputs::kAll;
  bool every_dtype = false;
  for (int i = 1; i < argc; ++i) {
    if (std::strcmp(argv[i], "--quick") == 0) inputs = bagua::Inputs::kQuick;
    if (std::strcmp(argv[i], "--races") == 0) inputs = bagua::Inputs::kRaces;
    if (std::strcmp(argv[i], "--every-dtype") == 0) every_dtype = true;
    if (std::strcmp(argv[i], "--skip-barrier") == 0 && i + 1 < argc) {
      bagua::emulation::skipped_barrier = std::atoi(argv[++i]);
    }
  }
  const bool few = inputs != bagua::Inputs::kAll;
  every_dtype = every_dtype || !few;
  bagua::emulation::must_be_loaded = true;
  bagua::fill_data_if_the_flag_is_set();
  bagua::compare_frames(*bagua::make_cuda_codec("fp16")->frames());
  bagua::for_each_codec([&](const auto& line) {
    bagua::compare_all<float>(line.name, inputs);
    bagua::compare_all<bagua::Half>(line.name, inputs);
    if (every_dtype) bagua::compare_all<bagua::BFloat16>(line.name, inputs);
  });
  bagua::compare_plain_sums<float>(inputs);
  bagua::compare_plain_sums<bagua::Half>(inputs);
  if (every_dtype) bagua::compare_plain_sums<bagua::BFloat16>(inputs);
  bagua::compare_divisions(few ? 500 : 20000);
  bagua::compare_sparse_messages(few);
  bagua::compare_low_rank(few, every_dtype);
  std::printf("all equal\n");
  return 0;
}
