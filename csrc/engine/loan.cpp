#include "engine/loan.h"

#include <utility>

#include <ATen/core/LegacyTypeDispatch.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/empty_strided.h>
#include <ATen/ops/from_blob.h>

namespace bagua {

at::Tensor Loan::alias() {
  at::AutoDispatchBelowADInplaceOrView below_autograd;
  if (!storage_) {
    storage_ = at::from_blob(
                   view_.data_ptr(), view_.sizes(), view_.strides(), [keep = view_](void*) {},
                   view_.options(), view_.device())
                   .storage();
  }
  at::Tensor alias = at::empty({0}, view_.options());
  alias.set_(storage_, 0, view_.sizes(), view_.strides());
  return alias;
}

bool Loan::is_alias(const at::Tensor& tensor) const {
  return storage_ && tensor.has_storage() && tensor.storage().is_alias_of(storage_) &&
         tensor.data_ptr() == view_.data_ptr() && tensor.strides() == view_.strides() &&
         tensor.sizes() == view_.sizes() && tensor.is_conj() == view_.is_conj() &&
         tensor.is_neg() == view_.is_neg();
}

void Loan::recall() {
  if (!storage_) return;
  if (storage_.use_count() == 1) return;
  at::AutoDispatchBelowADInplaceOrView below_autograd;
  at::Tensor copy = at::empty_strided(view_.sizes(), view_.strides(), view_.options());
  copy.copy_(view_);
  // Raw pointers that a holder took, as numpy does, stay valid as long as the storage: the old
  // memory is kept beside the new.
  struct Kept {
    at::Tensor copy;
    c10::DataPtr old;
  };
  void* data = copy.data_ptr();
  const c10::Device device = copy.device();
  auto kept = std::make_unique<Kept>();
  kept->copy = std::move(copy);
  Kept* raw = kept.get();
  raw->old = storage_.set_data_ptr(
      c10::DataPtr(data, kept.release(), [](void* p) { delete static_cast<Kept*>(p); }, device));
  storage_ = {};
}

}  // namespace bagua
