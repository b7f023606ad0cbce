#include "op/wire/sparse_message.h"

#include <utility>

#include <ATen/Dispatch.h>

#include "base/check.h"
#include "codec/chunk_format.h"
#include "codec/index_code.h"
#include "math/top_k.h"

namespace bagua {
namespace {

uint32_t* data_of(at::Tensor& indices) { return static_cast<uint32_t*>(indices.data_ptr()); }

}  // namespace

SparseMessage::SparseMessage(int64_t numel, int64_t k, at::ScalarType values)
    : dtype_(values),
      shape_{.numel = numel,
             .k = k,
             .element_bytes = static_cast<int64_t>(c10::elementSize(values)),
             .coding = choose_index_coding(numel, k),
             .bits = static_cast<int>(bits_per_index(numel)),
             .values_bytes = align_payload(k * static_cast<int64_t>(c10::elementSize(values))),
             .indices_bytes = index_bytes(numel, k)} {}

at::Tensor SparseMessage::values_of(const at::Tensor& message) const {
  return message.narrow(0, kFrameBytes, shape_.values_bytes).view(dtype_);
}

at::Tensor SparseMessage::indices_of(const at::Tensor& message) const {
  return message.narrow(0, kFrameBytes + shape_.values_bytes, shape_.indices_bytes);
}

void SparseMessage::take(at::Tensor& m, at::Tensor message, at::Tensor& indices) const {
  uint32_t* chosen = data_of(indices);
  at::Tensor values = values_of(message).zero_();  // padding too
  AT_DISPATCH_FLOATING_TYPES(dtype_, "sparse message", [&] {
    auto* from = m.mutable_data_ptr<scalar_t>();
    auto* to = values.mutable_data_ptr<scalar_t>();
    top_k(from, shape_.numel, shape_.k, chosen);
    for (int64_t i = 0; i < shape_.k; ++i) to[i] = std::exchange(from[chosen[i]], scalar_t{0});
  });
  pack_indices(chosen, shape_.k, shape_.numel,
               static_cast<std::byte*>(indices_of(message).data_ptr()));
}

void SparseMessage::add(const at::Tensor& message, at::Tensor& sum, at::Tensor& indices) const {
  uint32_t* chosen = data_of(indices);
  unpack_indices(static_cast<const std::byte*>(indices_of(message).const_data_ptr()), shape_.k,
                 shape_.numel, chosen);
  const at::Tensor values = values_of(message);
  AT_DISPATCH_FLOATING_TYPES(dtype_, "sparse message", [&] {
    auto* to = sum.mutable_data_ptr<scalar_t>();
    const auto* from = values.const_data_ptr<scalar_t>();
    for (int64_t i = 0; i < shape_.k; ++i) to[chosen[i]] += from[i];
  });
}

std::string SparseMessage::bad_indices() const {
  return concat("the indices of a sparse message (", coding(), ", ", shape_.k, " of ", shape_.numel,
                " elements) must ascend below ", shape_.numel);
}

}  // namespace bagua
