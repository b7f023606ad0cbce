// The decoders that need no torch: codecs, index codes, frames.
#include <bit>
#include <cmath>
#include <limits>
#include <string>

#include "base/check.h"
#include "codec/chunk_format.h"
#include "codec/factory.h"
#include "codec/index_code.h"
#include "op/wire/frame.h"
#include "target.h"

namespace bagua::fuzz {
namespace {

constexpr int64_t kMostNumel = 4200;  // two blocks and a bit
constexpr DType kDTypes[] = {DType::kFloat32, DType::kFloat16, DType::kBFloat16};

const std::vector<std::shared_ptr<const Codec>>& codecs() {
  static const auto all = [] {
    std::vector<std::shared_ptr<const Codec>> made;
    for (const std::string& name : codec_names()) made.push_back(make_codec(name));
    return made;
  }();
  return all;
}

// A chunk of one dtype in memory that ends where it ends.
struct Exact {
  Exact(const Codec& codec, DType dtype, int64_t numel, int64_t gap)
      : gap(gap),
        bytes(codec.payload_bytes(dtype, numel)),
        values(exactly<uint8_t>(numel * dtype_bytes(dtype))),
        memory(exactly<std::byte>(gap + bytes)),
        chunk{values.get(), memory.get() + gap, numel} {
    std::memset(values.get(), 0xab, numel * dtype_bytes(dtype));
  }

  int64_t gap;
  int64_t bytes;
  std::unique_ptr<uint8_t[]> values;
  std::unique_ptr<std::byte[]> memory;
  Chunk chunk;
};

float value_at(const Exact& exact, DType dtype, int64_t i) {
  return visit_dtype(dtype, [&]<typename T>(T value) {
    std::memcpy(&value, exact.values.get() + i * sizeof(T), sizeof(T));
    return widen(value);
  });
}

// Any payload decodes, twice to the same, and decode_add adds what decode writes.
void decode(Input input) {
  const Codec& codec = *codecs()[input.take<uint8_t>() % codecs().size()];
  const DType dtype = kDTypes[input.take<uint8_t>() % std::size(kDTypes)];
  const int64_t numel = input.up_to(kMostNumel), gap = 4 * (input.take<uint8_t>() % 9);
  const auto weight = input.take<float>();
  const Exact first(codec, dtype, numel, gap), second(codec, dtype, numel, gap);
  input.take_into(first.chunk.payload, first.bytes);
  if (first.bytes > 0) std::memcpy(second.chunk.payload, first.chunk.payload, first.bytes);
  const auto sum = exactly<float>(numel);
  for (int64_t i = 0; i < numel; ++i) sum[i] = 1.5f;
  const Chunk adding{sum.get(), first.chunk.payload, numel};
  codec.decode({&first.chunk, 1}, dtype, nullptr);
  const Chunk both[] = {second.chunk};
  codec.decode(both, dtype, nullptr);
  codec.decode_add({&adding, 1}, dtype, weight, nullptr);
  FUZZ_REQUIRE(numel == 0 || std::memcmp(first.values.get(), second.values.get(),
                                         numel * dtype_bytes(dtype)) == 0);
  for (int64_t i = 0; i < numel; ++i) {
    const float product = weight * value_at(first, dtype, i), expected = 1.5f + product;
    FUZZ_REQUIRE(sum[i] == expected || (std::isnan(sum[i]) && std::isnan(expected)));
  }
}

// Any numbers encode; finite ones decode to finite ones, a NaN or infinity to one that is not.
void encode(Input input) {
  const Codec& codec = *codecs()[input.take<uint8_t>() % codecs().size()];
  const DType dtype = kDTypes[input.take<uint8_t>() % std::size(kDTypes)];
  const int64_t numel = input.up_to(kMostNumel);
  const Exact there(codec, dtype, numel, 0), back(codec, dtype, numel, 0);
  input.take_into(there.values.get(), numel * dtype_bytes(dtype));
  codec.encode({&there.chunk, 1}, dtype, nullptr, nullptr);
  if (there.bytes > 0) std::memcpy(back.chunk.payload, there.chunk.payload, there.bytes);
  codec.decode({&back.chunk, 1}, dtype, nullptr);
  const int64_t block =
      codec.block_numel() == 0 ? std::max<int64_t>(numel, 1) : codec.block_numel();
  const bool half = codec.name() == "fp16" || dtype == DType::kFloat16;
  const float largest = half ? 65504.0f : std::numeric_limits<float>::max();
  for (int64_t begin = 0; begin < numel; begin += block) {
    bool finite = true, fits = true;
    for (int64_t i = begin; i < std::min(begin + block, numel); ++i) {
      finite = finite && std::isfinite(value_at(there, dtype, i));
      // Casts round what is too large for them, or for the dtype afterwards, to infinity.
      fits = fits && std::fabs(value_at(there, dtype, i)) <= 0.99f * largest;
    }
    for (int64_t i = begin; i < std::min(begin + block, numel); ++i) {
      const bool decoded = std::isfinite(value_at(back, dtype, i));
      FUZZ_REQUIRE(finite || !decoded);
      FUZZ_REQUIRE(!(finite && (fits || codec.block_numel() != 1)) || decoded);
    }
  }
}

std::vector<Bytes> payloads(bool decoded) {
  std::vector<Bytes> result;
  for (size_t which = 0; which < codecs().size(); ++which) {
    for (size_t type = 0; type < std::size(kDTypes); ++type) {
      for (const int64_t numel : {0, 1, 33, 300, 2049, 4100}) {
        const Codec& codec = *codecs()[which];
        const Exact exact(codec, kDTypes[type], numel, 0);
        visit_dtype(kDTypes[type], [&]<typename T>(T) {
          for (int64_t i = 0; i < numel; ++i) {
            const T value = narrow<T>(static_cast<float>(i % 97 - 48) * 0.37f);
            std::memcpy(exact.values.get() + i * sizeof(T), &value, sizeof(T));
          }
        });
        codec.encode({&exact.chunk, 1}, kDTypes[type], nullptr, nullptr);
        Example example;
        example.put(static_cast<uint8_t>(which)).put(static_cast<uint8_t>(type)).up_to(numel);
        if (decoded) {
          example.put(uint8_t{1}).put(0.5f).put_from(exact.chunk.payload, exact.bytes);
        } else {
          example.put_from(exact.values.get(), numel * dtype_bytes(kDTypes[type]));
        }
        result.push_back(example);
      }
    }
  }
  return result;
}

constexpr int64_t kMostElements = int64_t{1} << 32;
constexpr int64_t kMostIndices = 2000;
constexpr int kFuzzedPayload = 96;

// Any bytes are k ascending indices below n, or an Error; what is read is written back the same.
void indices(Input input) {
  const int64_t n = input.up_to(kMostElements);
  const int64_t k = input.up_to(std::min(n, kMostIndices));
  const int64_t bytes = index_bytes(n, k);
  const auto in = exactly<std::byte>(bytes), again = exactly<std::byte>(bytes);
  input.take_into(in.get(), bytes);
  const auto read = exactly<uint32_t>(k), second = exactly<uint32_t>(k);
  try {
    unpack_indices(in.get(), k, n, read.get());
  } catch (const Error&) {
    return;
  }
  for (int64_t i = 0; i < k; ++i) {
    FUZZ_REQUIRE(read[i] < n && (i == 0 || read[i] > read[i - 1]));
  }
  pack_indices(read.get(), k, n, again.get());
  unpack_indices(again.get(), k, n, second.get());
  FUZZ_REQUIRE(std::equal(read.get(), read.get() + k, second.get()));
}

std::vector<Bytes> index_messages() {
  struct Counts {
    int64_t n, k;
  };
  std::vector<Bytes> result;
  for (const auto& [n, k] :
       {Counts{0, 0}, Counts{1, 1}, Counts{2, 1}, Counts{100, 3}, Counts{1000, 60}, Counts{64, 64},
        Counts{5000, 1000}, Counts{70000, 40}, Counts{kMostElements, 7}}) {
    std::vector<uint32_t> chosen;
    for (int64_t i = 0; i < k; ++i) chosen.push_back(static_cast<uint32_t>((i + 1) * (n / k) - 1));
    Bytes bytes(index_bytes(n, k));
    pack_indices(chosen.data(), k, n, reinterpret_cast<std::byte*>(bytes.data()));
    result.push_back(Example().up_to(n).up_to(k).put_from(bytes.data(), bytes.size()));
  }
  return result;
}

uint32_t read_word(const std::byte* bytes) {
  uint32_t word;
  std::memcpy(&word, bytes, sizeof word);
  return word;
}

// A frame passes exactly if it is the expected one; with a checksum, not behind another word.
void frame(Input input) {
  Frame expected{input.take<uint64_t>(), input.take<uint64_t>(), kFuzzedPayload};
  expected.checksum = static_cast<Checksum>(input.take<uint8_t>() % 2);
  constexpr int64_t kBytes = kFrameBytes + kFuzzedPayload;
  const auto in = exactly<std::byte>(kBytes), wanted = exactly<std::byte>(kBytes);
  input.take_into(in.get(), kBytes);
  std::memcpy(wanted.get(), in.get(), kBytes);
  write_frame(expected, wanted.get());
  const auto passes = [&] {
    try {
      check_frame(in.get(), expected, 3, "bucket");
    } catch (const MismatchError& error) {
      FUZZ_REQUIRE(std::string(error.what()).find("from rank 3") != std::string::npos);
      return false;
    }
    return true;
  };
  const bool passed = passes();
  FUZZ_REQUIRE(passed == (std::memcmp(in.get(), wanted.get(), kFrameBytes) == 0));
  if (!passed || expected.checksum == Checksum::kOff) return;
  std::byte* word = in.get() + kFrameBytes + 4 * input.up_to(kFuzzedPayload / 4 - 1);
  const uint32_t before = read_word(word), after = input.take<uint32_t>();
  std::memcpy(word, &after, sizeof after);
  FUZZ_REQUIRE(passes() == (before == after));
}

std::vector<Bytes> frames() {
  std::vector<Bytes> result;
  for (const uint64_t step : {0ull, 1ull, ~0ull}) {
    for (const Checksum checksum : {Checksum::kOff, Checksum::kOn}) {
      const uint64_t fingerprint = frame_fingerprint("block_uint8", 0, 128, 0, "bucket");
      std::byte bytes[kFrameBytes + kFuzzedPayload];
      for (int i = 0; i < kFuzzedPayload; ++i) bytes[kFrameBytes + i] = std::byte(i * 37);
      write_frame({fingerprint, step, kFuzzedPayload, checksum}, bytes);
      result.push_back(Example().put(fingerprint).put(step).put(checksum).put(bytes));
    }
  }
  return result;
}

constexpr Target kTargets[] = {
    {"decode", decode, [] { return payloads(true); }},
    {"encode", encode, [] { return payloads(false); }},
    {"indices", indices, index_messages},
    {"frame", frame, frames},
};

}  // namespace

std::span<const Target> targets() { return kTargets; }

}  // namespace bagua::fuzz
