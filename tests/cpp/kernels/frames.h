// Kernels of frames beside plain copies.
#pragma once

#include <cstdio>
#include <cstdlib>
#include <vector>

#include "base/mixed_bits.h"
#include "codec/frame_kernels.h"
#include "kernels/frame_reference.h"

namespace bagua {

// Frames at scattered places, more than one launch holds: those places and no others are written,
// and read back in order.
inline void compare_frames(const FrameKernels& cuda) {
  const FrameReference reference;
  for (const size_t count : {0u, 1u, 7u, 96u, 97u, 500u}) {
    constexpr size_t kStride = 5;  // words from a frame to the next, of which it has four
    std::vector<uint64_t> memory(count * kStride + 1, 0x5a), expected = memory;
    std::vector<PlacedFrame> to_cuda, to_reference;
    std::vector<const std::byte*> places;
    for (size_t i = 0; i < count; ++i) {
      const size_t at = (i * 11 % count) * kStride;  // no two alike: 11 divides no count
      FrameWords words;
      for (size_t word = 0; word < words.size(); ++word) words[word] = mixed_bits(i * 4 + word);
      to_cuda.push_back({reinterpret_cast<std::byte*>(&memory[at]), words});
      to_reference.push_back({reinterpret_cast<std::byte*>(&expected[at]), words});
      places.push_back(to_cuda.back().place);
    }
    cuda.write(to_cuda, nullptr);
    reference.write(to_reference, nullptr);
    std::vector<FrameWords> read(count + 1), wanted(count + 1);
    cuda.read(places, read.data(), nullptr);
    reference.read(places, wanted.data(), nullptr);
    if (memory == expected && read == wanted) continue;
    std::printf("frames: %zu are not as written\n", count);
    std::exit(1);
  }
}

}  // namespace bagua
