// A tile: the consecutive elements of a chunk that one warp works on.
//
// Memory is read and written in vectors of 16 bytes of elements. Lane l of the warp has the vectors
// l, l + 32, l + 64, ..., so that every access of the warp is one run of consecutive bytes; the
// codes of a vector (4 to 16 bytes) are a separate access, just as consecutive. Vectors are
// handled as 32-bit words in registers, all of a tile's loads before the first use: 8 KiB in flight
// per warp. Elements that fill no vector, or all of them where the chunk is not aligned, are
// handled one by one: lane l has the elements l, l + 32, ...
#pragma once

#include <cstddef>
#include <cstdint>

#include "base/device.h"
#include "base/dtype.h"
#include "base/warp.cuh"
#include "codec/chunk_batch.h"
#include "codec/chunk_format.h"

namespace bagua {

constexpr int kTileNumel = 2048;
constexpr int kVectorBytes = 16;

BAGUA_HD constexpr int64_t tiles_of(int64_t numel) { return (numel + kTileNumel - 1) / kTileNumel; }

template <int kCount>
struct Words {
  uint32_t word[kCount];
};

// The address must be a multiple of the words' bytes.
template <int kCount>
BAGUA_DEVICE Words<kCount> load_words(const void* address) {
  static_assert(kCount == 1 || kCount == 2 || kCount == 4);
  if constexpr (kCount == 1) {
    const uint1 loaded = *static_cast<const uint1*>(address);
    return {{loaded.x}};
  } else if constexpr (kCount == 2) {
    const uint2 loaded = *static_cast<const uint2*>(address);
    return {{loaded.x, loaded.y}};
  } else {
    const uint4 loaded = *static_cast<const uint4*>(address);
    return {{loaded.x, loaded.y, loaded.z, loaded.w}};
  }
}

// Likewise.
template <int kCount>
BAGUA_DEVICE void store_words(void* address, const Words<kCount>& words) {
  static_assert(kCount == 1 || kCount == 2 || kCount == 4);
  if constexpr (kCount == 1) {
    store_at_once(static_cast<uint1*>(address), make_uint1(words.word[0]));
  } else if constexpr (kCount == 2) {
    store_at_once(static_cast<uint2*>(address), make_uint2(words.word[0], words.word[1]));
  } else {
    store_at_once(static_cast<uint4*>(address),
                  make_uint4(words.word[0], words.word[1], words.word[2], words.word[3]));
  }
}

// Element i of the elements or codes that lie side by side in the words.
template <typename Element, int kCount>
BAGUA_DEVICE Element element_of(const Words<kCount>& words, int i) {
  constexpr int kPerWord = 4 / sizeof(Element);
  const uint32_t bits = words.word[i / kPerWord] >> (i % kPerWord * 8 * sizeof(Element));
  if constexpr (sizeof(Element) == 4) {
    return bits_to_float(bits);
  } else if constexpr (sizeof(Element) == 2) {
    return Element{static_cast<uint16_t>(bits)};
  } else {
    return static_cast<uint8_t>(bits);
  }
}

// Puts element i where zeros are (a float: whatever is there).
template <typename Element, int kCount>
BAGUA_DEVICE void put_element(Words<kCount>& words, int i, Element element) {
  constexpr int kPerWord = 4 / sizeof(Element);
  const int shift = i % kPerWord * 8 * static_cast<int>(sizeof(Element));
  if constexpr (sizeof(Element) == 4) {
    words.word[i] = float_to_bits(element);
  } else if constexpr (sizeof(Element) == 2) {
    words.word[i / kPerWord] |= uint32_t{element.bits} << shift;
  } else {
    words.word[i / kPerWord] |= uint32_t{element} << shift;
  }
}

// The lanes of the warp write zeros.
BAGUA_DEVICE void clear_bytes(std::byte* begin, std::byte* end) {
  for (std::byte* byte = begin + lane_index(); byte < end; byte += kWarpLanes) *byte = std::byte{0};
}

// Zeros behind the headers and behind the codes; by the warp of a chunk's last tile.
BAGUA_DEVICE void clear_padding(const Chunk& chunk, const RangedLayout& layout) {
  clear_bytes(chunk.payload + layout.headers_bytes, chunk.payload + layout.codes_offset);
  clear_bytes(chunk.payload + layout.codes_offset + layout.codes_bytes,
              chunk.payload + layout.payload_bytes);
}

// The lane's vectors of kPerVector elements in a tile: the first one starts at element `begin()`,
// the others follow at multiples of kStep behind it.
template <int kPerVector>
struct LaneVectors {
  static constexpr int kStep = kWarpLanes * kPerVector;
  static constexpr int kCount = kTileNumel / kStep;
  BAGUA_DEVICE static int begin() { return lane_index() * kPerVector; }
};

// A chunk's tile `index`, which starts at element `first` and is shorter only at the chunk's end.
struct Tile {
  Chunk chunk;
  int64_t index;
  int64_t first;
  int numel;

  BAGUA_DEVICE Tile(const Chunk& of, int64_t number)
      : chunk(of), index(number), first(number * kTileNumel) {
    const int64_t left = chunk.numel - first;
    numel = left < kTileNumel ? static_cast<int>(left) : kTileNumel;
  }

  BAGUA_DEVICE bool is_last() const { return first + numel == chunk.numel; }

  // Number of elements handled as vectors of kPerVector, each with kCodeBytes of codes: none
  // where the chunk does not lie at multiples of both sizes.
  template <int kPerVector, int kCodeBytes>
  BAGUA_DEVICE int whole_vectors() const {
    const bool aligned = reinterpret_cast<uintptr_t>(chunk.x) % kVectorBytes == 0 &&
                         reinterpret_cast<uintptr_t>(chunk.payload) % kCodeBytes == 0;
    return aligned ? numel / kPerVector * kPerVector : 0;
  }
};

}  // namespace bagua
