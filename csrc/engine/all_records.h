// Exchange of one record of fixed size among all ranks.
#pragma once

#include <cstring>
#include <type_traits>
#include <vector>

#include <ATen/ops/empty.h>

#include "comm/communicator.h"

namespace bagua {

// The records of all ranks, by rank. Every rank calls it; the communicator is one of CPU tensors.
template <typename Record>
std::vector<Record> all_records(Communicator& communicator, const Record& mine) {
  static_assert(std::is_trivially_copyable_v<Record>);
  const auto bytes = static_cast<int64_t>(sizeof mine);
  const int size = communicator.group().size;
  at::Tensor input = at::empty({bytes}, at::kByte);
  at::Tensor output = at::empty({size * bytes}, at::kByte);
  std::memcpy(input.data_ptr(), &mine, sizeof mine);
  communicator.all_gather(input, output);
  std::vector<Record> all(size);
  std::memcpy(all.data(), output.data_ptr(), size * sizeof mine);
  return all;
}

}  // namespace bagua
