// Sparse gradients, as other ranks may send them.
#pragma once

#include <algorithm>
#include <memory>
#include <vector>

#include <ATen/ops/_sparse_coo_tensor_unsafe.h>
#include <ATen/ops/arange.h>
#include <ATen/ops/ones.h>
#include <ATen/ops/zeros.h>

#include "base/check.h"
#include "hostile.h"
#include "op/all_reduce_rows.h"

namespace bagua::fuzz {

// Numbers of rows, then indices and values: refused, or added to rows that there are.
inline void rows_op(Input input) {
  const int64_t rows = 1 + input.up_to(300), width = input.up_to(5);
  const int64_t own = std::min(rows, input.up_to(40));
  const auto communicator = std::make_shared<HostileCommunicator>(Group{1, 3}, input);
  const auto gradient = std::make_shared<SparseGradient>();
  const std::vector<int64_t> sizes{rows, width};
  gradient->local = at::_sparse_coo_tensor_unsafe(
      at::arange(own, at::kLong).view({1, own}), at::ones({own, width}), sizes,
      at::TensorOptions(at::kFloat).layout(at::kSparse), false);
  AllReduceRows op(communicator, std::make_shared<Scratch>(), gradient, sizes, ReduceOp::kSum);
  at::Tensor flat = at::zeros({1});
  try {
    op.run(flat, {.number = 1, .grad_scale = 1, .bucket = "fuzzed"});
  } catch (const MismatchError&) {
    return;
  }
  const at::Tensor indices = gradient->result._indices().view({-1});
  const int64_t count = indices.numel();
  FUZZ_REQUIRE(count <= rows && gradient->result._values().size(0) == count);
  for (int64_t i = 0; i < count; ++i) {
    const int64_t index = indices.data_ptr<int64_t>()[i];
    FUZZ_REQUIRE(index >= 0 && index < rows);
  }
}

inline std::vector<Bytes> rows_ops() {
  std::vector<Bytes> result;
  for (const uint8_t changes : {0, 1, 3}) {
    result.push_back(
        Example().up_to(99).up_to(4).up_to(7).put(changes).up_to(3).put(uint8_t{2}).put(changes));
  }
  Example announced;  // three numbers of rows
  announced.up_to(99).up_to(4).up_to(2).put(uint8_t{0xff});
  for (const int64_t number : {5, 2, 0}) announced.put(number);
  result.push_back(announced.put(uint8_t{0}));
  return result;
}

}  // namespace bagua::fuzz
