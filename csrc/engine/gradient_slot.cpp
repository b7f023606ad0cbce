#include "engine/gradient_slot.h"

#include <utility>

#include <ATen/ScalarOps.h>
#include <ATen/core/LegacyTypeDispatch.h>
#include <ATen/ops/mul.h>
#include <torch/csrc/autograd/variable.h>

#include "base/check.h"

namespace bagua {

namespace autograd = torch::autograd;

namespace {

// Whether only the parameter holds `grad`, which autograd has just accumulated. A gradient
// that was stolen from `incoming` shares its memory, and that of the tensor it is a view of.
bool nobody_else_holds(const at::Tensor& grad, const at::Tensor& incoming) {
  if (grad.requires_grad() || grad.use_count() > 1) return false;
  size_t known = 1;
  if (incoming.defined() && incoming.has_storage() && incoming.is_alias_of(grad)) {
    known += incoming.is_view() ? 2 : 1;
  }
  return grad.storage().use_count() <= known;
}

// The node that accumulates into `parameter`, which may be frozen: it is thawed later.
auto accumulator_of(at::Tensor parameter) {
  const bool frozen = !parameter.requires_grad();
  if (frozen) parameter.set_requires_grad(true);
  auto node = autograd::impl::grad_accumulator(parameter);
  if (frozen) parameter.set_requires_grad(false);
  return node;
}

}  // namespace

GradientSlot::GradientSlot(SlotId number, const Slot& place, const Bucket& bucket)
    : id(number),
      slot(&place),
      scale(bucket.adopt_scale),
      parameter(place.parameter),
      view(place.view(bucket.flat)),
      loan(view),
      node(accumulator_of(place.parameter)) {
  // A gradient that the builder of the bucket has put there becomes an alias like any other.
  at::Tensor& grad = parameter.mutable_grad();
  if (lends() && grad.defined() && grad.data_ptr() == view.data_ptr()) grad = loan.alias();
}

bool GradientSlot::has_foreign_hooks() const {
  return node->post_hooks().size() > 1 || node->tensor_post_acc_grad_hooks() != nullptr;
}

void GradientSlot::put(const at::Tensor& gradient, double factor) {
  if (factor != 1.0) {
    at::mul_out(view, gradient, at::native::wrapped_scalar_tensor(factor));
  } else {
    view.copy_(gradient);
  }
}

void GradientSlot::take_nothing() {
  at::AutoDispatchBelowADInplaceOrView below_autograd;
  loan.recall();
  view.zero_();
  if (slot->sparse) slot->sparse->local = at::Tensor();
  result = Result::kCopy;
}

void GradientSlot::restore() {
  if (result != Result::kCopy) return;
  at::AutoDispatchBelowADInplaceOrView below_autograd;
  at::Tensor& grad = parameter.mutable_grad();
  if (slot->sparse) {
    grad = std::exchange(slot->sparse->result, {});
  } else if (grad.defined()) {
    grad.copy_(view);
  } else {
    grad = lends() ? loan.alias() : view.clone();
  }
}

bool GradientSlot::adopt(const at::Tensor& incoming, bool lend) {
  at::Tensor& grad = parameter.mutable_grad();
  if (!grad.defined()) return false;
  // backward(create_graph=True): .grad stays part of the graph, as this rank's share of the mean.
  if (grad.requires_grad() && scale != 1.0) grad = at::mul(grad, scale);
  const double factor = grad.requires_grad() ? 1.0 : scale;
  at::AutoDispatchBelowADInplaceOrView below_autograd;
  const std::string& name = slot->name;
  if (slot->sparse) {
    check_rows(grad, parameter.sizes(), view, name);
    slot->sparse->local = grad.detach();
    result = Result::kCopy;
    return true;
  }
  BAGUA_CHECK(grad.layout() == at::kStrided, "the gradient of '", name,
              "' is sparse. Those of torch.nn.Embedding and EmbeddingBag modules can be "
              "communicated, other buckets are dense: use sparse=False, or exclude the parameter "
              "through _bagua_params_and_buffers_to_ignore.");
  BAGUA_CHECK(grad.scalar_type() == view.scalar_type() && grad.sizes() == view.sizes() &&
                  grad.device() == view.device(),
              "the gradient of '", name, "' is ", grad.toString(), grad.sizes(), " on ",
              grad.device().str(), ", its bucket holds ", view.toString(), view.sizes(), " on ",
              view.device().str(), ". Wrap the model again after changing it.");
  if (lend && lends() && loan.is_alias(grad)) {
    if (factor != 1.0) put(view, factor);
    result = Result::kInPlace;
    return true;
  }
  loan.recall();
  put(grad.detach(), factor);
  if (lend && lends() && nobody_else_holds(grad, incoming)) {
    grad = loan.alias();
    result = Result::kInPlace;
  } else {
    result = Result::kCopy;
  }
  return true;
}

}  // namespace bagua
