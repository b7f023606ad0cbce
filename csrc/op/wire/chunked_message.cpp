#include "op/wire/chunked_message.h"

#include <algorithm>
#include <array>
#include <cstring>

#include "base/check.h"
#include "codec/chunk_format.h"
#include "codec/index_code.h"
#include "codec/value_blocks.h"
#include "math/top_k.h"

namespace bagua {
namespace {

template <typename T>
using OfChunk = std::array<T, kSparseChunkNumel>;

int64_t sent_of(int64_t numel, int64_t k) {
  return (numel * k + kSparseChunkNumel - 1) / kSparseChunkNumel;
}

}  // namespace

ChunkedMessage::ChunkedMessage(int64_t numel, int64_t k)
    : numel_(numel), k_(k), chunks_((numel + kSparseChunkNumel - 1) / kSparseChunkNumel) {
  BAGUA_CHECK_ARG(numel >= 0 && k >= 1 && k <= kSparseChunkNumel, "a chunk of ", kSparseChunkNumel,
                  " elements sends 1 to all of them, not ", k, ".");
  const int64_t whole = numel / kSparseChunkNumel, rest = numel % kSparseChunkNumel;
  const int64_t last = sent_of(rest, k);
  headers_end_ = kFrameBytes + whole * value_headers_bytes(k) + value_headers_bytes(last);
  codes_ = align_payload(headers_end_);
  codes_end_ = codes_ + whole * value_codes_bytes(k) + value_codes_bytes(last);
  indices_ = align_payload(codes_end_);
  bytes_ = indices_ + whole * index_bytes(kSparseChunkNumel, k) + index_bytes(rest, last);
}

ChunkedMessage::Place ChunkedMessage::place(int64_t number) const {
  const int64_t first = number * kSparseChunkNumel;
  const int64_t numel = std::min(kSparseChunkNumel, numel_ - first);
  return {.first = first,
          .numel = numel,
          .k = sent_of(numel, k_),
          .headers = kFrameBytes + number * value_headers_bytes(k_),
          .codes = codes_ + number * value_codes_bytes(k_),
          .indices = indices_ + number * index_bytes(kSparseChunkNumel, k_)};
}

void ChunkedMessage::write_padding(std::byte* message) const {
  std::memset(message + headers_end_, 0, codes_ - headers_end_);
  std::memset(message + codes_end_, 0, indices_ - codes_end_);
}

template <typename T>
void ChunkedMessage::take(int64_t number, T* x, std::byte* message) const {
  const Place at = place(number);
  T* const own = x + at.first;
  std::byte* const headers = message + at.headers;
  auto* const codes = reinterpret_cast<uint8_t*>(message + at.codes);
  OfChunk<uint32_t> chosen;
  OfChunk<float> values;
  top_k(own, at.numel, at.k, chosen.data());
  for (int64_t i = 0; i < at.k; ++i) values[i] = static_cast<float>(own[chosen[i]]);
  encode_values(values.data(), at.k, headers, codes);
  pack_indices(chosen.data(), at.k, at.numel, message + at.indices);
  decode_values(headers, codes, at.k, values.data());
  for (int64_t i = 0; i < at.k; ++i) own[chosen[i]] -= static_cast<T>(values[i]);
}

template <typename T>
void ChunkedMessage::add(int64_t number, const std::byte* message, T* sum) const {
  const Place at = place(number);
  OfChunk<uint32_t> chosen;
  OfChunk<float> values;
  unpack_indices(message + at.indices, at.k, at.numel, chosen.data());
  decode_values(message + at.headers, reinterpret_cast<const uint8_t*>(message + at.codes), at.k,
                values.data());
  T* const own = sum + at.first;
  for (int64_t i = 0; i < at.k; ++i) own[chosen[i]] += static_cast<T>(values[i]);
}

template void ChunkedMessage::take<float>(int64_t, float*, std::byte*) const;
template void ChunkedMessage::take<double>(int64_t, double*, std::byte*) const;
template void ChunkedMessage::add<float>(int64_t, const std::byte*, float*) const;
template void ChunkedMessage::add<double>(int64_t, const std::byte*, double*) const;

}  // namespace bagua
