// Prints checksums of what the codecs and the maths of messages give for numbers drawn by a rule:
// the same lines on every processor (tests/deep/test_aarch64.py).
#include <cmath>
#include <cstdio>
#include <cstring>
#include <limits>
#include <vector>

#include "base/mixed_bits.h"
#include "codec/factory.h"
#include "math/checksum.h"
#include "math/thin_factors.h"
#include "math/top_k.h"

namespace bagua {
namespace {

constexpr DType kDTypes[] = {DType::kFloat32, DType::kFloat16, DType::kBFloat16};
constexpr const char* kDTypeNames[] = {"f32", "f16", "bf16"};
constexpr int64_t kNumels[] = {1, 31, 256, 2048, 2049, 10007};
constexpr float kScales[] = {1e-38f, 1e-9f, 1e-3f, 1.0f, 1e4f, 1e30f};
constexpr float kPoison[] = {std::numeric_limits<float>::quiet_NaN(),
                             std::numeric_limits<float>::infinity(),
                             -std::numeric_limits<float>::infinity()};

// A number in (-1, 1) of 24 bits, scaled: exact on every processor.
float number(uint64_t seed, int64_t i, float scale) {
  const uint64_t bits = mixed_bits(seed * 0x9e3779b97f4a7c15 + static_cast<uint64_t>(i) + 1);
  return static_cast<float>(static_cast<int32_t>(bits >> 39) - (1 << 24)) * 0x1p-24f * scale;
}

template <typename T>
std::vector<T> numbers(uint64_t seed, int64_t numel, float scale) {
  std::vector<T> x(numel);
  for (int64_t i = 0; i < numel; ++i) x[i] = narrow<T>(number(seed, i, scale));
  return x;
}

template <>
std::vector<double> numbers(uint64_t seed, int64_t numel, float scale) {
  std::vector<double> x(numel);
  for (int64_t i = 0; i < numel; ++i) x[i] = number(seed, i, scale);
  return x;
}

// Of everything that is put into it, in order.
class Sum {
 public:
  void put(const void* data, int64_t bytes) {
    std::vector<std::byte> words((bytes + 3) / 4 * 4);
    std::memcpy(words.data(), data, bytes);
    value_ = mixed_bits(value_ ^ payload_checksum(words.data(), words.size()));
  }
  template <typename T>
  void put(const std::vector<T>& x) {
    put(x.data(), static_cast<int64_t>(x.size() * sizeof(T)));
  }
  // Which NaN a NaN is is the processor's own.
  template <typename T>
  void put_numbers(std::vector<T> x) {
    for (T& value : x) {
      if (std::isnan(widen(value))) value = narrow<T>(-1.0f);
    }
    put(x);
  }
  uint64_t value() const { return value_; }

 private:
  uint64_t value_ = 0;
};

void print(const char* what, const char* of, const Sum& sum) {
  std::printf("%s %s %016llx\n", what, of, static_cast<unsigned long long>(sum.value()));
}

template <typename T>
void put_codec(const Codec& codec, DType dtype, std::vector<T> x, Sum& payloads, Sum& decoded) {
  const auto numel = static_cast<int64_t>(x.size());
  std::vector<std::byte> payload(codec.payload_bytes(dtype, numel));
  const Chunk chunk{x.data(), payload.data(), numel};
  codec.encode({&chunk, 1}, dtype, nullptr, nullptr);
  payloads.put(payload);
  auto sum = numbers<float>(7, numel, 1.0f);
  const Chunk adding{sum.data(), payload.data(), numel};
  codec.decode_add({&adding, 1}, dtype, 0.3f, nullptr);
  decoded.put_numbers(sum);
  codec.decode({&chunk, 1}, dtype, nullptr);
  decoded.put_numbers(x);
}

void codecs() {
  for (const std::string& name : codec_names()) {
    const auto codec = make_codec(name);
    for (size_t type = 0; type < std::size(kDTypes); ++type) {
      Sum payloads, decoded;
      visit_dtype(kDTypes[type], [&]<typename T>(T) {
        uint64_t seed = 0;
        for (const int64_t numel : kNumels) {
          for (const float scale : kScales) {
            auto x = numbers<T>(++seed, numel, scale);
            put_codec(*codec, kDTypes[type], x, payloads, decoded);
            for (auto& value : x) value = x[0];
            put_codec(*codec, kDTypes[type], x, payloads, decoded);
          }
          for (const float poison : kPoison) {
            auto x = numbers<T>(++seed, numel, 1.0f);
            x[numel / 2] = narrow<T>(poison);
            put_codec(*codec, kDTypes[type], x, payloads, decoded);
          }
        }
      });
      print((name + " payload").c_str(), kDTypeNames[type], payloads);
      print((name + " decoded").c_str(), kDTypeNames[type], decoded);
    }
  }
}

void sparse() {
  Sum chosen;
  for (const int64_t n : {64, 1000, 70000}) {
    for (const int64_t k : {int64_t{1}, n / 20 + 1, n / 2}) {
      auto x = numbers<float>(n + k, n, 1.0f);
      x[3] = kPoison[0];
      std::vector<uint32_t> of(k), of_doubles(k);
      top_k(x.data(), n, k, of.data());
      top_k(numbers<double>(n, n, 1e30f).data(), n, k, of_doubles.data());
      chosen.put(of);
      chosen.put(of_doubles);
    }
  }
  print("top_k", "indices", chosen);
}

template <typename W>
void low_rank(const char* name) {
  Sum factors;
  for (const ThinShape shape : {ThinShape{5, 7, 1}, ThinShape{130, 67, 4}, ThinShape{33, 260, 8}}) {
    const auto x = numbers<W>(shape.rows, shape.rows * shape.columns, 1.0f);
    const auto error = numbers<W>(shape.columns, shape.rows * shape.columns, 1e-3f);
    const auto q = numbers<W>(shape.rank, shape.rank * shape.columns, 1.0f);
    std::vector<W> m(x.size()), p(shape.rank * shape.rows), next(q.size()), back(x.size());
    project_rows<W, W>(x.data(), W{0.5}, error.data(), m.data(), q.data(), p.data(), shape, 0,
                       shape.rows);
    std::vector<double> basis(p.begin(), p.end());
    std::vector<char> vanished(shape.rank);
    orthonormalise(basis.data(), shape.rank, shape.rows, reinterpret_cast<bool*>(vanished.data()));
    for (size_t i = 0; i < p.size(); ++i) p[i] = static_cast<W>(basis[i]);
    project_columns<W>(m.data(), p.data(), next.data(), shape, 0, shape.columns);
    reconstruct_rows<W, W>(p.data(), next.data(), W{2}, back.data(), m.data(), shape, 0,
                           shape.rows);
    factors.put(p);
    factors.put(next);
    factors.put(back);
    factors.put(m);
  }
  print("low rank", name, factors);
}

}  // namespace
}  // namespace bagua

int main() {
  bagua::codecs();
  bagua::sparse();
  bagua::low_rank<float>("f32");
  bagua::low_rank<double>("f64");
}
