// A fuzz target: one decoder, given arbitrary bytes. driver.cpp makes the inputs; sanitizers and
// FUZZ_REQUIRE say what is wrong.
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <memory>
#include <span>
#include <type_traits>
#include <vector>

namespace bagua::fuzz {

using Bytes = std::vector<uint8_t>;

// Reads an input from the front; behind its end there are zeros.
class Input {
 public:
  explicit Input(std::span<const uint8_t> bytes) : bytes_(bytes) {}

  template <typename T>
  T take() {
    static_assert(std::is_trivially_copyable_v<T>);
    T value{};
    take_into(&value, sizeof value);
    return value;
  }
  // A number from 0 to `most`; small ones are frequent, as edges lie there.
  int64_t up_to(int64_t most) {
    const auto shift = take<uint8_t>() % 64;
    return static_cast<int64_t>((take<uint64_t>() >> shift) % (static_cast<uint64_t>(most) + 1));
  }
  void take_into(void* out, size_t size) {
    const size_t there = std::min(size, bytes_.size());
    if (there > 0) std::memcpy(out, bytes_.data(), there);
    if (size > there) std::memset(static_cast<uint8_t*>(out) + there, 0, size - there);
    bytes_ = bytes_.subspan(there);
  }

 private:
  std::span<const uint8_t> bytes_;
};

// Writes an input as Input reads it.
class Example {
 public:
  template <typename T>
  Example& put(const T& value) {
    static_assert(std::is_trivially_copyable_v<T>);
    return put_from(&value, sizeof value);
  }
  Example& up_to(int64_t value) { return put(uint8_t{0}).put(static_cast<uint64_t>(value)); }
  Example& put_from(const void* data, size_t size) {
    const auto* first = static_cast<const uint8_t*>(data);
    bytes_.insert(bytes_.end(), first, first + size);
    return *this;
  }
  operator Bytes() const { return bytes_; }

 private:
  Bytes bytes_;
};

// Memory of exactly `count` elements: one byte before or behind it is a sanitizer's report.
template <typename T>
std::unique_ptr<T[]> exactly(size_t count) {
  return std::unique_ptr<T[]>(new T[count]);
}

struct Target {
  const char* name;
  // May throw nothing: what the decoder documents is caught inside.
  void (*run)(Input input);
  // Valid inputs, to be changed a little.
  std::vector<Bytes> (*examples)();
};

// The targets of this program.
std::span<const Target> targets();

// Says what was wrong and with which input, and aborts.
[[noreturn]] void fail(const char* what);

}  // namespace bagua::fuzz

#define FUZZ_REQUIRE(condition)                                     \
  do {                                                              \
    if (!(condition)) ::bagua::fuzz::fail("not true: " #condition); \
  } while (false)
