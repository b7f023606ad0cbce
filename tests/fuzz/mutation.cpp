#include "mutation.h"

#include <array>

namespace bagua::fuzz {
namespace {

constexpr size_t kLongestRandom = 512;

// Where decoders have their edges: ends of integer ranges, NaN, infinities, largest and smallest
// numbers of float, half and bfloat16.
constexpr std::array<uint64_t, 22> kInteresting{
    0,          1,          0xff,       0x7f,       0x80,       0xffff,     0x7fff,     0x8000,
    0xffffffff, 0x7fffffff, 0x80000000, 0x7f800000, 0xff800000, 0x7fc00000, 0x7f7fffff, 0x00000001,
    0x7c00,     0x7e00,     0x7f80,     ~0ull,      1ull << 63, ~0ull >> 1};

}  // namespace

const Bytes& Mutation::next() {
  if (examples_.empty() || below(8) == 0) {
    input_.resize(below(kLongestRandom));
    for (uint8_t& byte : input_) byte = static_cast<uint8_t>(random_());
    return input_;
  }
  input_ = examples_[below(examples_.size())];
  for (uint64_t changes = 1 + below(8); changes > 0; --changes) change();
  return input_;
}

void Mutation::overwrite(uint64_t value, size_t width) {
  if (input_.size() < width) return;
  std::memcpy(input_.data() + below(input_.size() - width + 1), &value, width);
}

void Mutation::change() {
  const size_t size = input_.size();
  if (size == 0) return input_.push_back(static_cast<uint8_t>(random_()));
  const size_t from = below(size), count = 1 + below(std::min<size_t>(size - from, 32));
  switch (below(8)) {
    case 0:
      input_[from] ^= static_cast<uint8_t>(1u << below(8));
      return;
    case 1:
      return overwrite(random_(), 1);
    case 2:
      return overwrite(kInteresting[below(kInteresting.size())], 2);
    case 3:
      return overwrite(kInteresting[below(kInteresting.size())], 4);
    case 4:
      return overwrite(kInteresting[below(kInteresting.size())], 8);
    case 5:  // a piece of it once more, elsewhere
      std::memmove(input_.data() + below(size - count + 1), input_.data() + from, count);
      return;
    case 6:
      input_.erase(input_.begin() + from, input_.begin() + from + count);
      return;
    default: {  // more of it
      const Bytes piece(input_.begin() + from, input_.begin() + from + count);
      input_.insert(input_.begin() + below(size), piece.begin(), piece.end());
    }
  }
}

}  // namespace bagua::fuzz
