#include "op/wire/sparse_message.h"

#include <limits>
#include <tuple>
#include <utility>

#include <ATen/Dispatch.h>
#include <ATen/ops/sort.h>
#include <ATen/ops/topk.h>

#include "base/check.h"
#include "codec/chunk_format.h"
#include "codec/index_code.h"
#include "math/top_k.h"

namespace bagua {
namespace {

constexpr int64_t kIndexMask = 0xffffffff;

uint32_t* data_of(at::Tensor& indices) { return static_cast<uint32_t*>(indices.data_ptr()); }

}  // namespace

SparseMessage::SparseMessage(int64_t numel, int64_t k, at::ScalarType values, at::Device device)
    : numel_(numel),
      k_(k),
      dtype_(values),
      on_cpu_(device.is_cpu()),
      values_bytes_(align_payload(k * static_cast<int64_t>(c10::elementSize(values)))),
      indices_bytes_(on_cpu_ ? index_bytes(numel, k) : align_payload(k * 4)) {}

std::string SparseMessage::coding() const {
  return index_coding_name(on_cpu_ ? choose_index_coding(numel_, k_) : IndexCoding::kWords);
}

at::Tensor SparseMessage::values_of(const at::Tensor& message) const {
  return message.narrow(0, kFrameBytes, values_bytes_).view(dtype_).narrow(0, 0, k_);
}

at::Tensor SparseMessage::indices_of(const at::Tensor& message) const {
  return message.narrow(0, kFrameBytes + values_bytes_, indices_bytes_);
}

void SparseMessage::take(at::Tensor& m, at::Tensor message, at::Tensor& indices) const {
  message.narrow(0, kFrameBytes, values_bytes_).zero_();  // padding
  if (!on_cpu_) return take_on_device(m, message);
  uint32_t* chosen = data_of(indices);
  at::Tensor values = values_of(message);
  AT_DISPATCH_FLOATING_TYPES(dtype_, "sparse message", [&] {
    auto* from = m.mutable_data_ptr<scalar_t>();
    auto* to = values.mutable_data_ptr<scalar_t>();
    top_k(from, numel_, k_, chosen);
    for (int64_t i = 0; i < k_; ++i) to[i] = std::exchange(from[chosen[i]], scalar_t{0});
  });
  pack_indices(chosen, k_, numel_, static_cast<std::byte*>(indices_of(message).data_ptr()));
}

at::Tensor SparseMessage::add(const at::Tensor& message, at::Tensor& sum,
                              at::Tensor& indices) const {
  if (!on_cpu_) return add_on_device(message, sum);
  uint32_t* chosen = data_of(indices);
  unpack_indices(static_cast<const std::byte*>(indices_of(message).const_data_ptr()), k_, numel_,
                 chosen);
  const at::Tensor values = values_of(message);
  AT_DISPATCH_FLOATING_TYPES(dtype_, "sparse message", [&] {
    const auto* from = values.const_data_ptr<scalar_t>();
    auto* to = sum.mutable_data_ptr<scalar_t>();
    for (int64_t i = 0; i < k_; ++i) to[chosen[i]] += from[i];
  });
  return {};
}

std::string SparseMessage::bad_indices() const {
  return concat("the indices of a sparse message (words, ", k_, " of ", numel_,
                " elements) must ascend below ", numel_);
}

void SparseMessage::take_on_device(at::Tensor& m, at::Tensor& message) const {
  const at::Tensor largest = std::get<1>(at::topk(m.abs(), k_, 0, true, false));
  const at::Tensor chosen = std::get<0>(at::sort(largest));
  values_of(message).copy_(m.index_select(0, chosen));
  m.index_fill_(0, chosen, 0);
  at::Tensor words = indices_of(message).view(at::kInt);
  words.narrow(0, 0, k_).copy_(chosen);
  words.narrow(0, k_, words.numel() - k_).zero_();
}

at::Tensor SparseMessage::add_on_device(const at::Tensor& message, at::Tensor& sum) const {
  const at::Tensor words = indices_of(message).view(at::kInt).narrow(0, 0, k_);
  const at::Tensor chosen = words.to(at::kLong).bitwise_and(kIndexMask);
  at::Tensor valid = chosen.narrow(0, k_ - 1, 1).lt(numel_).all();
  if (k_ > 1) {
    const at::Tensor ascend = chosen.narrow(0, 1, k_ - 1).gt(chosen.narrow(0, 0, k_ - 1)).all();
    valid = valid.logical_and(ascend);
  }
  const at::Tensor safe = chosen.clamp_max(numel_ - 1);
  const double nan = std::numeric_limits<double>::quiet_NaN();
  sum.index_add_(0, safe, values_of(message).masked_fill(valid.logical_not(), nan));
  return valid;
}

}  // namespace bagua
