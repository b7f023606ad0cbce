#include "op/tensors/low_rank_device.h"

#include <utility>
#include <vector>

#include <ATen/ops/from_blob.h>

#include "base/check.h"

namespace bagua {
namespace {

std::vector<LowRankItem> matrices_of(const LowRankLayout& layout) {
  std::vector<LowRankItem> items;
  for (const LowRankLayout::Placed& placed : layout.placed) {
    const LowRankMatrix& m = placed.matrix;
    items.push_back({.offset = m.offset,
                     .rows = m.rows,
                     .columns = m.columns,
                     .rank = m.rank,
                     .left = placed.left,
                     .right = placed.right,
                     .vectors = 0,
                     .partials = 0});
  }
  return items;
}

std::vector<LowRankItem> ranges_of(const LowRankLayout& layout) {
  std::vector<LowRankItem> items;
  for (size_t i = 0; i < layout.rest.size(); ++i) {
    items.push_back({.offset = layout.rest[i].offset,
                     .rows = 1,
                     .columns = layout.rest[i].numel,
                     .rank = 0,
                     .left = layout.rest_left[i],
                     .right = 0,
                     .vectors = 0,
                     .partials = 0});
  }
  return items;
}

LowRankDType dtype_of(at::ScalarType type) {
  switch (type) {
    case at::kDouble:
      return LowRankDType::kFloat64;
    case at::kHalf:
      return LowRankDType::kFloat16;
    case at::kBFloat16:
      return LowRankDType::kBFloat16;
    case at::kFloat:
      return LowRankDType::kFloat32;
    default:
      BAGUA_CHECK_ARG(false, "low-rank products take floating tensors, not ", c10::toString(type),
                      ".");
  }
}

}  // namespace

LowRankDevice::LowRankDevice(const LowRankLayout& layout, at::Device device,
                             std::shared_ptr<const LowRankKernels> kernels)
    : kernels_(std::move(kernels)), table_(matrices_of(layout), ranges_of(layout)) {
  const std::vector<std::byte>& bytes = table_.bytes();
  copy_ = at::from_blob(const_cast<std::byte*>(bytes.data()), {static_cast<int64_t>(bytes.size())},
                        at::kByte)
              .to(device);
}

LowRankPlan LowRankDevice::plan() const {
  return table_.at(static_cast<const std::byte*>(copy_.const_data_ptr()));
}

LowRankMemory memory_of(const LowRankValues& values, const LowRankResults& results, int ranks) {
  return {.dtype = dtype_of(values.flat.scalar_type()),
          .flat = values.flat.data_ptr(),
          .error = values.error.defined() ? values.error.data_ptr() : nullptr,
          .work = values.work.data_ptr(),
          .queries = values.queries.data_ptr(),
          .left = values.left.data_ptr(),
          .right = values.right.data_ptr(),
          .next_queries = results.next_queries.data_ptr(),
          .vectors = results.vectors.data_ptr<double>(),
          .partials = results.partials.data_ptr(),
          .vanished = results.vanished.data_ptr<bool>(),
          .finite = results.finite.data_ptr<bool>(),
          .scale = values.scale,
          .ranks = ranks};
}

}  // namespace bagua
