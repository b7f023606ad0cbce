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

int64_t payload_bytes(const Codec* codec, at::ScalarType values, int64_t k) {
  if (codec != nullptr) return codec->payload_bytes(DType::kFloat32, k);
  return align_payload(k * static_cast<int64_t>(c10::elementSize(values)));
}

}  // namespace

SparseMessage::SparseMessage(int64_t numel, int64_t k, at::ScalarType values, const Codec* codec)
    : dtype_(values),
      codec_(codec),
      shape_{.numel = numel,
             .k = k,
             .element_bytes = static_cast<int64_t>(c10::elementSize(values)),
             .coding = choose_index_coding(numel, k),
             .bits = static_cast<int>(bits_per_index(numel)),
             .values_bytes = payload_bytes(codec, values, k),
             .indices_bytes = index_bytes(numel, k)} {}

std::string SparseMessage::coding() const {
  const std::string indices = index_coding_name(shape_.coding);
  return codec_ == nullptr ? indices : concat(indices, " ", codec_->name());
}

at::Tensor SparseMessage::payload_of(const at::Tensor& message) const {
  return message.narrow(0, kFrameBytes, shape_.values_bytes);
}

at::Tensor SparseMessage::values_of(const at::Tensor& message) const {
  return payload_of(message).view(dtype_).narrow(0, 0, shape_.k);
}

Chunk SparseMessage::chunk_of(const at::Tensor& message, const Work& work) const {
  return {work.values.data_ptr(), static_cast<std::byte*>(payload_of(message).data_ptr()),
          shape_.k};
}

at::Tensor SparseMessage::indices_of(const at::Tensor& message) const {
  return message.narrow(0, kFrameBytes + shape_.values_bytes, shape_.indices_bytes);
}

void SparseMessage::take(at::Tensor& m, at::Tensor message, Work& work) const {
  uint32_t* chosen = data_of(work.indices);
  AT_DISPATCH_FLOATING_TYPES(dtype_, "sparse message", [&] {
    auto* from = m.mutable_data_ptr<scalar_t>();
    top_k(from, shape_.numel, shape_.k, chosen);
    if (codec_ == nullptr) {
      payload_of(message).zero_();  // padding
      auto* to = values_of(message).template mutable_data_ptr<scalar_t>();
      for (int64_t i = 0; i < shape_.k; ++i) to[i] = std::exchange(from[chosen[i]], scalar_t{0});
      return;
    }
    auto* values = work.values.template mutable_data_ptr<float>();
    for (int64_t i = 0; i < shape_.k; ++i) values[i] = static_cast<float>(from[chosen[i]]);
    const Chunk chunk = chunk_of(message, work);
    codec_->encode({&chunk, 1}, DType::kFloat32, nullptr, nullptr);
    codec_->decode({&chunk, 1}, DType::kFloat32, nullptr);
    for (int64_t i = 0; i < shape_.k; ++i) from[chosen[i]] -= static_cast<scalar_t>(values[i]);
  });
  pack_indices(chosen, shape_.k, shape_.numel,
               static_cast<std::byte*>(indices_of(message).data_ptr()));
}

void SparseMessage::add(const at::Tensor& message, at::Tensor& sum, Work& work) const {
  uint32_t* chosen = data_of(work.indices);
  unpack_indices(static_cast<const std::byte*>(indices_of(message).const_data_ptr()), shape_.k,
                 shape_.numel, chosen);
  AT_DISPATCH_FLOATING_TYPES(dtype_, "sparse message", [&] {
    auto* to = sum.mutable_data_ptr<scalar_t>();
    const auto add_all = [&](const auto* values) {
      for (int64_t i = 0; i < shape_.k; ++i) to[chosen[i]] += static_cast<scalar_t>(values[i]);
    };
    if (codec_ == nullptr) return add_all(values_of(message).template const_data_ptr<scalar_t>());
    const Chunk chunk = chunk_of(message, work);
    codec_->decode({&chunk, 1}, DType::kFloat32, nullptr);
    add_all(work.values.template const_data_ptr<float>());
  });
}

std::string SparseMessage::bad_indices() const {
  return concat("the indices of a sparse message (", coding(), ", ", shape_.k, " of ", shape_.numel,
                " elements) must ascend below ", shape_.numel);
}

}  // namespace bagua
