// Exchange of records among all ranks.
#pragma once

#include <cstring>
#include <span>
#include <type_traits>
#include <vector>

#include <ATen/ops/empty.h>

#include "comm/communicator.h"

namespace bagua {

// The records of all ranks, by rank. Every rank calls it, with as many; the communicator is one of
// CPU tensors.
template <typename Record>
std::vector<Record> all_records(Communicator& communicator, std::span<const Record> mine) {
  static_assert(std::is_trivially_copyable_v<Record>);
  const int size = communicator.group().size;
  at::Tensor input = at::empty({static_cast<int64_t>(mine.size_bytes())}, at::kByte);
  at::Tensor output = at::empty({size * input.numel()}, at::kByte);
  std::memcpy(input.data_ptr(), mine.data(), mine.size_bytes());
  communicator.all_gather(input, output);
  std::vector<Record> all(size * mine.size());
  std::memcpy(all.data(), output.data_ptr(), output.nbytes());
  return all;
}

}  // namespace bagua
