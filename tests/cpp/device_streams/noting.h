// Notes of what codecs of the fake device touch.
#pragma once

#include <span>
#include <string>

#include "base/check.h"
#include "codec/chunk_batch.h"
#include "codec/codec.h"
#include "fake_device/fake_device.h"

namespace bagua::fake {

template <typename... Args>
void expect(bool condition, const Args&... what) {
  if (!condition) throw Error(concat(what...));
}

// A kernel called `what` reads or writes this memory.
inline void note(const char* what, StreamHandle stream, const void* begin, int64_t bytes,
                 bool write) {
  const auto handle = reinterpret_cast<intptr_t>(stream);
  expect(handle > 0, what, " was called without a stream");
  count({.bytes_read = write ? 0 : bytes, .bytes_written = write ? bytes : 0});
  Device::instance().access(static_cast<int>(handle - 1), what, begin, bytes, write);
}

// As many launches as the chunks fill batches, `each` for a batch.
inline void count_launches(std::span<const Chunk> chunks, int64_t each = 1) {
  for_each_batch(
      chunks, [](int64_t numel) { return numel; },
      [&](const ChunkBatch&) { count({.launches = each}); });
}

}  // namespace bagua::fake
