#include "op/tensors/low_rank_device.h"

#include <utility>
#include <vector>

#include <ATen/ops/from_blob.h>

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

}  // namespace bagua
