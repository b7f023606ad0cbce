#include "engine/gradient_path.h"

#include <utility>

#include <ATen/ScalarOps.h>
#include <ATen/core/LegacyTypeDispatch.h>
#include <ATen/ops/mul.h>
#include <torch/csrc/autograd/engine.h>
#include <torch/csrc/autograd/function.h>
#include <torch/csrc/autograd/graph_task.h>
#include <torch/csrc/autograd/variable.h>

#include "base/check.h"

namespace bagua {

namespace autograd = torch::autograd;

struct GradientPath::GradSlot {
  SlotId id;
  const Slot* slot;
  double scale;  // Bucket::adopt_scale
  at::Tensor parameter;
  at::Tensor view;
  decltype(autograd::impl::grad_accumulator(std::declval<at::Tensor>())) node;  // kept alive
  uintptr_t hook = 0;
};

// For everything that autograd's engine calls.
template <typename Body>
void GradientPath::under_autograd(Body body) {
  try {
    body();
  } catch (...) {
    if (options_.on_error) options_.on_error(std::current_exception());
    throw;
  }
}

// Runs after a parameter's gradient has been accumulated.
struct GradientPath::Hook final : autograd::FunctionPostHook {
  Hook(std::weak_ptr<GradientPath> owner, GradSlot* grad_slot)
      : path(std::move(owner)), slot(grad_slot) {}
  autograd::variable_list operator()(const autograd::variable_list& outputs,
                                     const autograd::variable_list&) override {
    if (auto owner = path.lock()) owner->under_autograd([&] { owner->on_gradient(*slot); });
    return outputs;
  }
  std::weak_ptr<GradientPath> path;
  GradSlot* slot;
};

std::shared_ptr<GradientPath> GradientPath::make(std::shared_ptr<Engine> engine,
                                                 GradientPathOptions options) {
  std::shared_ptr<GradientPath> path(new GradientPath(std::move(engine), std::move(options)));
  if (path->options_.install_hooks) path->install_hooks();
  return path;
}

GradientPath::GradientPath(std::shared_ptr<Engine> engine, GradientPathOptions options)
    : engine_(std::move(engine)), options_(std::move(options)) {
  SlotId id = 0;
  for (size_t i = 0; i < engine_->buckets(); ++i) {
    const Bucket& bucket = engine_->bucket(i);
    for (const Slot& slot : bucket.slots) {
      if (slot.adopt != Adopt::kNone) {
        slots_.push_back(std::make_unique<GradSlot>(
            GradSlot{id, &slot, bucket.adopt_scale, slot.parameter, slot.view(bucket.flat),
                     autograd::impl::grad_accumulator(slot.parameter)}));
      }
      ++id;
    }
  }
}

GradientPath::~GradientPath() { remove_hooks(); }

void GradientPath::install_hooks() {
  for (auto& slot : slots_) {
    slot->hook = slot->node->add_post_hook(std::make_unique<Hook>(weak_from_this(), slot.get()));
  }
}

void GradientPath::remove_hooks() {
  for (auto& slot : slots_) {
    if (slot->hook) slot->node->del_post_hook(std::exchange(slot->hook, 0));
  }
}

void GradientPath::begin_round(float grad_scale, double result_scale) {
  if (astray_) {
    const std::string reason = concat(
        "round ", engine_->round(),
        ": parameters received gradients, but backward did not go through what the module's "
        "forward "
        "had returned, so nothing was communicated. Compute the loss from the module's output, or "
        "run such a backward inside no_sync(); then wrap again with with_bagua on every rank.");
    engine_->abort(reason);
    throw Error(reason);
  }
  engine_->begin_round(grad_scale);
  result_scale_ = result_scale;
  phase_ = kArmed;
  fired_ = 0;
  watched_ = false;
}

void GradientPath::watch(const std::vector<at::Tensor>& outputs) {
  const int64_t round = engine_->round();
  for (const at::Tensor& output : outputs) {
    if (!output.requires_grad()) continue;
    output.register_hook([weak = weak_from_this(), round](const at::Tensor&) {
      if (auto path = weak.lock()) path->under_autograd([&] { path->on_backward(round); });
    });
    watched_ = true;
  }
}

void GradientPath::on_backward(int64_t round) {
  if (!sync_) return;
  BAGUA_CHECK(phase_ != kIdle && round == engine_->round(),
              "a second backward through the forward of round ", round,
              ", whose gradients have been communicated already. Run all but the last backward of "
              "a forward inside no_sync(), or run the forward again.");
  const auto* nodes = autograd::get_current_graph_task_exec_info();
  const bool whole_graph = nodes == nullptr || nodes->empty();
  if (phase_ == kArmed && whole_graph && options_.before_backward) options_.before_backward();
  int expected = kArmed;
  if (!phase_.compare_exchange_strong(expected, kActive)) return;
  autograd::Engine::get_default_engine().queue_callback([weak = weak_from_this(), whole_graph] {
    if (auto path = weak.lock()) path->under_autograd([&] { path->finish(whole_graph); });
  });
}

void GradientPath::on_gradient(GradSlot& slot) {
  const bool last_slot_finishes = !watched_;
  if (sync_ && last_slot_finishes) {
    int expected = kArmed;
    phase_.compare_exchange_strong(expected, kActive);
  }
  const bool sent_now = sync_ && phase_ == kActive;
  adopt(slot, sent_now ? slot.scale : 1.0);
  if (sync_ && phase_ == kArmed) astray_ = true;
  if (!sent_now) return;
  BAGUA_CHECK(engine_->mark_ready(slot.id), "parameter '", slot.slot->name,
              "' received a gradient twice in one backward, after its bucket may have been sent. "
              "A parameter shared between modules under checkpoint(use_reentrant=True) does this: "
              "use checkpoint(use_reentrant=False).");
  if (++fired_ == slots_.size() && last_slot_finishes) {
    autograd::Engine::get_default_engine().queue_callback([weak = weak_from_this()] {
      if (auto path = weak.lock()) path->under_autograd([&] { path->finish(true); });
    });
  }
}

void GradientPath::adopt(SlotId id) {
  for (auto& slot : slots_) {
    if (slot->id == id) adopt(*slot, slot->scale);
  }
}

// True if the parameter has a gradient, which then lies in the bucket, multiplied by `scale`.
bool GradientPath::adopt(GradSlot& slot, double scale) {
  at::AutoDispatchBelowADInplaceOrView below_autograd;
  at::Tensor& grad = slot.parameter.mutable_grad();
  if (!grad.defined()) return false;
  const std::string& name = slot.slot->name;
  BAGUA_CHECK(grad.layout() == at::kStrided, "the gradient of '", name,
              "' is sparse. Buckets are dense: use Embedding(sparse=False), or exclude the "
              "parameter through _bagua_params_and_buffers_to_ignore.");
  BAGUA_CHECK(!grad.requires_grad(), "the gradient of '", name,
              "' is part of a graph (backward(create_graph=True)), which communication would cut. "
              "Use torch.autograd.grad(create_graph=True) for the inner gradient, or no_sync().");
  BAGUA_CHECK(grad.scalar_type() == slot.view.scalar_type() && grad.sizes() == slot.view.sizes() &&
                  grad.device() == slot.view.device(),
              "the gradient of '", name, "' is ", grad.toString(), grad.sizes(), " on ",
              grad.device().str(), ", its bucket holds ", slot.view.toString(), slot.view.sizes(),
              " on ", slot.view.device().str(), ". Wrap the model again after changing it.");
  const bool is_view =
      grad.data_ptr() == slot.view.data_ptr() && grad.strides() == slot.view.strides();
  if (scale != 1.0) {
    at::mul_out(slot.view, is_view ? slot.view : grad.detach(),
                at::native::wrapped_scalar_tensor(scale));
  } else if (!is_view) {
    slot.view.copy_(grad.detach());
  }
  if (!is_view && slot.slot->adopt == Adopt::kGradView) grad = slot.view;
  return true;
}

void GradientPath::finish(bool whole_graph) {
  if (phase_ != kActive) return;
  if (!whole_graph && fired_ == 0) {  // torch.autograd.grad(): Note [End of backward]
    phase_ = kArmed;
    return;
  }
  phase_ = kIdle;
  astray_ = false;
  const std::vector<GradSlot*> undefined = mark_remaining();
  if (options_.after_backward) {
    options_.after_backward();
  } else {
    engine_->wait();
  }
  scale_results();
  restore_gradients(undefined);
}

void GradientPath::scale_results() {
  if (result_scale_ == 1.0) return;
  at::AutoDispatchBelowADInplaceOrView below_autograd;
  for (size_t i = 0; i < engine_->buckets(); ++i) {
    at::Tensor flat = engine_->bucket(i).flat;
    at::mul_out(flat, flat, at::native::wrapped_scalar_tensor(result_scale_));
  }
}

std::vector<GradientPath::GradSlot*> GradientPath::mark_remaining() {
  std::vector<GradSlot*> undefined;
  std::vector<uint8_t> used(engine_->slots(), 1);
  std::vector<std::string> names;
  const bool all_fired = options_.install_hooks && fired_ == slots_.size();
  for (auto& slot : slots_) {
    if (all_fired) break;
    if (engine_->marked(slot->id)) continue;
    if (!adopt(*slot, slot->scale)) {
      at::AutoDispatchBelowADInplaceOrView below_autograd;
      slot->view.zero_();
      undefined.push_back(slot.get());
      names.push_back(slot->slot->name);
      used[slot->id] = 0;
    }
    engine_->mark_ready(slot->id);
  }
  if (options_.find_unused) {
    engine_->exchange_used(std::move(used));
  } else if (!names.empty() && options_.on_unused && !std::exchange(warned_unused_, true)) {
    options_.on_unused(names);
  }
  return undefined;
}

// Slots whose parameter had no gradient get the communicated one, unless no rank used them; copied
// slots get theirs back.
void GradientPath::restore_gradients(const std::vector<GradSlot*>& undefined) {
  at::AutoDispatchBelowADInplaceOrView below_autograd;
  for (GradSlot* slot : undefined) {
    if (options_.find_unused && !engine_->used()[slot->id]) continue;
    const bool view = slot->slot->adopt == Adopt::kGradView;
    slot->parameter.mutable_grad() = view ? slot->view : slot->view.clone();
  }
  for (auto& slot : slots_) {
    if (slot->slot->adopt != Adopt::kGradCopy || !slot->parameter.grad().defined()) continue;
    slot->parameter.mutable_grad().copy_(slot->view);
  }
}

}  // namespace bagua
