#include "engine/gradient_path.h"

#include <utility>

#include <ATen/ScalarOps.h>
#include <ATen/core/LegacyTypeDispatch.h>
#include <ATen/ops/mul.h>
#include <c10/util/ScopeExit.h>
#include <torch/csrc/autograd/engine.h>
#include <torch/csrc/autograd/function.h>
#include <torch/csrc/autograd/graph_task.h>
#include <torch/csrc/autograd/variable.h>

#include "base/check.h"
#include "engine/gradient_slot.h"
#include "engine/torch_reducer.h"

namespace bagua {

namespace autograd = torch::autograd;

// For everything that autograd's engine calls.
template <typename Body>
void GradientPath::under_autograd(Body body) {
  try {
    body();
  } catch (...) {
    engine_->note_error(std::current_exception());
    if (options_.on_error) options_.on_error(std::current_exception());
    throw;
  }
}

[[noreturn]] static void refuse_compiled_autograd() {
  C10_THROW_ERROR(NotImplementedError,
                  "bagua's hooks, which send gradients, are not part of a compiled backward. Turn "
                  "compiled autograd off (torch._dynamo.config.compiled_autograd = False); "
                  "torch.compile of the model compiles its backward without it.");
}

// Runs before the backward of what has made an output.
struct GradientPath::OutputHook final : autograd::FunctionPreHook {
  explicit OutputHook(std::weak_ptr<GradientPath> owner) : path(std::move(owner)) {}
  autograd::variable_list operator()(const autograd::variable_list& gradients) override {
    if (auto owner = path.lock()) owner->under_autograd([&] { owner->on_backward(); });
    return gradients;
  }
  void compiled_args(torch::dynamo::autograd::CompiledNodeArgs&) const override {
    refuse_compiled_autograd();
  }
  std::weak_ptr<GradientPath> path;
};

// Runs after a parameter's gradient has been accumulated.
struct GradientPath::Hook final : autograd::FunctionPostHook {
  Hook(std::weak_ptr<GradientPath> owner, GradientSlot* grad_slot)
      : path(std::move(owner)), slot(grad_slot) {}
  autograd::variable_list operator()(const autograd::variable_list& outputs,
                                     const autograd::variable_list& inputs) override {
    if (auto owner = path.lock()) {
      owner->under_autograd(
          [&] { owner->on_gradient(*slot, inputs.empty() ? at::Tensor() : inputs[0]); });
    }
    return outputs;
  }
  void compiled_args(torch::dynamo::autograd::CompiledNodeArgs&) const override {
    refuse_compiled_autograd();
  }
  std::weak_ptr<GradientPath> path;
  GradientSlot* slot;
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
        slots_.push_back(std::make_unique<GradientSlot>(id, slot, bucket));
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

// The beginning of a round.

void GradientPath::begin_forward(bool communicates) {
  if (!communicates) {
    engine_->note_forward();
    local_forwards_ = true;
    expecting_ = in_forward_ = false;
    return;
  }
  engine_->check_process();
  if (bypassed_output_ > 0) {
    refuse(concat(
        "round ", engine_->round() + (engine_->round_open() ? 0 : 1),
        ": parameters received gradients, but backward did not go through what the module's "
        "forward had returned and reached only ",
        bypassed_output_.load(), " of ", needed_,
        " parameters, so nothing was communicated. Compute the loss from the module's output, or "
        "run such a backward after a forward inside no_sync(); then wrap again with bagua.wrap on "
        "every rank."));
  }
  // A backward that an exception cut off: the engine raises if it had begun to send.
  if (phase_ == kActive) {
    if (engine_->round_open()) engine_->begin_round();
    opened_ = false;
  }
  phase_ = kIdle;
  expecting_ = in_forward_ = true;
  watched_ = false;
  needed_ = 0;
  for (const auto& slot : slots_) needed_ += slot->frozen() ? 0 : 1;
}

void GradientPath::begin_round(float grad_scale, double result_scale, const RankSamples& samples) {
  engine_->begin_round({.grad_scale = grad_scale, .frozen = frozen_slots(), .samples = samples});
  result_scale_ = result_scale;
  opened_ = true;
}

uint64_t GradientPath::frozen_slots() const {
  uint64_t hash = 0;
  for (const auto& slot : slots_) {
    if (slot->frozen()) hash = (hash + static_cast<uint64_t>(slot->id) + 1) * 0x9e3779b97f4a7c15;
  }
  return hash;
}

void GradientPath::watch(const std::vector<at::Tensor>& outputs) {
  in_forward_ = false;
  for (const at::Tensor& output : outputs) {
    // A hook on a leaf (a parameter, an input) would stay there and see every later backward.
    if (!output.requires_grad() || output.is_leaf()) continue;
    output.grad_fn()->add_tensor_pre_hook(std::make_unique<OutputHook>(weak_from_this()));
    watched_ = true;
  }
}

bool GradientPath::in_backward() const {
  return phase_ == kActive && autograd::get_current_graph_task_id() != -1;
}

// One of autograd's threads opens the round; the others wait for it.
void GradientPath::activate(bool rooted) {
  const std::lock_guard lock(opening_);
  if (phase_ == kIdle) {
    refuse_torch_reducer();
    if (!opened_ && options_.open_round) {
      options_.open_round();
    } else if (!engine_->round_open()) {
      begin_round(1.0f);
    }
    if (rooted && options_.before_backward) options_.before_backward();
    fired_ = 0;
    rooted_ = left_ = false;
    forget_bypassed_outputs();
    for (auto& slot : slots_) {
      slot->version = version_of(slot->parameter);
      slot->result = GradientSlot::Result::kInPlace;
      slot->if_used = false;
      slot->hits = 0;
    }
    weight_versions_.clear();
    for (const auto& [_, parameter] : options_.weights) {
      weight_versions_.push_back(version_of(parameter));
    }
    phase_ = kActive;
  }
  if (rooted && !rooted_.exchange(true)) queue_finish();
}

void GradientPath::activate_inside_forward(GradientSlot& first) {
  // before_backward looks at the gradients from before; that of `first` has been made since.
  at::Tensor& grad = first.parameter.mutable_grad();
  at::Tensor made = std::exchange(grad, {});
  const auto restore = c10::make_scope_exit([&] { grad = std::move(made); });
  activate(true);
}

void GradientPath::forget_bypassed_outputs() {
  bypassed_output_ = 0;
  for (auto& slot : slots_) slot->bypassed_output = false;
}

void GradientPath::queue_finish() {
  autograd::Engine::get_default_engine().queue_callback([weak = weak_from_this()] {
    if (auto path = weak.lock()) {
      path->under_autograd([&] {
        path->refuse_unfinished();
        path->finish();
      });
    }
  });
}

// Gradients arrive.

void GradientPath::on_backward() {
  const auto* nodes = autograd::get_current_graph_task_exec_info();
  if (nodes == nullptr || nodes->empty()) return activate(true);
  // autograd.grad(), which accumulates nothing, or backward(inputs=...): a gradient distinguishes
  // the two.
  partial_task_ = autograd::get_current_graph_task_id();
}

void GradientPath::on_gradient(GradientSlot& slot, const at::Tensor& incoming) {
  // A function whose backward returns None reaches the node without a gradient; a hook of the
  // user's may have taken it away.
  const bool defined = slot.parameter.grad().defined();
  slot.touched = slot.touched || defined;
  if (phase_ == kIdle) {
    if (in_forward_) {
      activate_inside_forward(slot);
    } else if (partial_task_ == autograd::get_current_graph_task_id()) {
      activate(true);
    } else if (expecting_ && watched_) {
      return on_bypassed_output(slot);
    } else if (expecting_) {
      activate(false);
    } else {
      return on_past_wrapper(slot);
    }
  }
  if (options_.static_graph && !count_hit(slot)) return;
  if (!defined) return leave_for_the_end();
  // Hooks that run after this one see the rank's own gradient, unscaled.
  slot.adopt(incoming, /*lend=*/!slot.has_foreign_hooks());
  BAGUA_CHECK(engine_->mark_ready(slot.id), "parameter '", slot.slot->name,
              "' received a gradient twice in one backward, after its bucket may have been sent. "
              "A parameter shared between modules under checkpoint(use_reentrant=True) does this: "
              "use checkpoint(use_reentrant=False) or static_graph=True.");
  if (++fired_ == needed_ && !rooted_) queue_finish();
}

void GradientPath::leave_for_the_end() {
  left_ = true;
  if (++fired_ == needed_ && !rooted_) queue_finish();
}

// Note [Static graph]: whether this is the last part of the slot's gradient.
bool GradientPath::count_hit(GradientSlot& slot) {
  ++slot.hits;
  if (!counted_) {
    if (slot.hits == 1 && ++fired_ == needed_ && !rooted_) queue_finish();
    return false;
  }
  BAGUA_CHECK(slot.expected_hits > 0, "parameter '", slot.slot->name,
              "' received a gradient, but not in the first backward: static_graph=True promises "
              "that every backward reaches the same parameters.");
  return slot.hits >= slot.expected_hits;
}

void GradientPath::on_bypassed_output(GradientSlot& slot) {
  if (std::exchange(slot.bypassed_output, true)) return;
  if (++bypassed_output_ < needed_) return;
  activate(false);
  queue_finish();
}

void GradientPath::on_past_wrapper(GradientSlot& slot) {
  if (local_forwards_ || !options_.on_past_wrapper || slot.has_foreign_hooks()) return;
  if (!warned_past_wrapper_.exchange(true)) options_.on_past_wrapper(slot.slot->name);
}

void GradientPath::adopt(SlotId id) {
  for (auto& slot : slots_) {
    if (slot->id == id && !slot->adopt({}, /*lend=*/true)) slot->take_nothing();
  }
}

// The end of a round.

void GradientPath::finish() {
  if (phase_ != kActive) return;
  phase_ = kIdle;
  expecting_ = opened_ = false;
  partial_task_ = -1;
  forget_bypassed_outputs();
  check_versions();
  mark_remaining();
  if (options_.after_backward) {
    options_.after_backward();
  } else {
    engine_->wait();
  }
  scale_results();
  restore_gradients();
  for (auto& slot : slots_) {
    slot->touched = false;
    if (!counted_) slot->expected_hits = slot->hits;
  }
  counted_ = true;
  if (options_.after_gradients) options_.after_gradients();
}

void GradientPath::check_versions() const {
  for (const auto& slot : slots_) {
    if (slot->version != version_of(slot->parameter) && slot->has_foreign_hooks()) {
      refuse_step(slot->slot->name);
    }
  }
  for (size_t i = 0; i < options_.weights.size(); ++i) {
    const auto& [name, parameter] = options_.weights[i];
    if (weight_versions_[i] != version_of(parameter)) refuse_step(name);
  }
}

void GradientPath::refuse(const std::string& reason) const {
  engine_->abort(reason);
  throw Error(reason);
}

void GradientPath::refuse_torch_reducer() const {
  for (const auto& slot : slots_) {
    if (!has_torch_reducer(slot->parameter)) continue;
    refuse(
        concat("the gradient of parameter '", slot->slot->name,
               "' is averaged by torch's DistributedDataParallel or replicate() too, so it would "
               "be wrong. Wrap the module once, by bagua or by torch."));
  }
}

// A callback that an inner backward calls: the node that runs it is still being evaluated.
void GradientPath::refuse_unfinished() const {
  if (phase_ != kActive || !in_forward_ || !autograd::get_current_node()) return;
  refuse(
      "a backward inside the module's forward ran a separate backward, as "
      "checkpoint(use_reentrant=True) does, and its end cannot be known. Use "
      "checkpoint(use_reentrant=False), or call backward() after the forward has returned.");
}

void GradientPath::refuse_step(const std::string& parameter) const {
  refuse(concat("parameter '", parameter,
                "' was changed while backward ran: a hook on it "
                "(register_post_accumulate_grad_hook, or on its accumulation node) makes optimizer "
                "steps, with this rank's own gradient instead of the communicated one. Step after "
                "backward(); or use torch.distributed.optim._apply_optimizer_in_backward, whose "
                "steps are made when communication is over."));
}

void GradientPath::scale_results() {
  if (result_scale_ == 1.0 || engine_->by_samples()) return;
  at::AutoDispatchBelowADInplaceOrView below_autograd;
  for (size_t i = 0; i < engine_->buckets(); ++i) {
    at::Tensor flat = engine_->bucket(i).flat;
    at::mul_out(flat, flat, at::native::wrapped_scalar_tensor(result_scale_));
  }
  for (auto& slot : slots_) {
    if (slot->slot->sparse) slot->slot->sparse->result._values().mul_(result_scale_);
  }
}

// Note [Every parameter answers]
void GradientPath::mark_remaining() {
  const bool exchange = options_.find_unused || options_.static_graph;
  std::vector<uint8_t> used(engine_->slots(), 1);
  std::vector<std::string> names;
  for (auto& slot : slots_) {
    if (fired_ == slots_.size() && counted_ && !left_) break;
    if (engine_->marked(slot->id)) continue;
    const bool untouched =
        options_.install_hooks ? !slot->touched : !slot->parameter.grad().defined();
    if (slot->frozen()) {
      slot->take_nothing();
      slot->result = GradientSlot::Result::kKeep;
      used[slot->id] = 0;
    } else if (exchange && untouched) {
      // .grad is from a round before: it changes only if another rank has more.
      slot->loan.recall();
      if (!slot->adopt({}, /*lend=*/false)) slot->take_nothing();
      slot->if_used = true;
      used[slot->id] = 0;
    } else if (!slot->adopt({}, /*lend=*/true)) {
      slot->take_nothing();
      if (untouched) names.push_back(slot->slot->name);
    }
    engine_->mark_ready(slot->id);
  }
  if (exchange) {
    engine_->exchange_used(std::move(used));
  } else if (!names.empty() && options_.on_unused && !std::exchange(warned_unused_, true)) {
    options_.on_unused(names);
  }
}

void GradientPath::restore_gradients() {
  for (auto& slot : slots_) {
    if (!slot->if_used || engine_->used()[slot->id]) slot->restore();
  }
}

void GradientPath::answer_with_zeros() {
  for (auto& slot : slots_) {
    slot->take_nothing();
    engine_->mark_ready(slot->id);
  }
  if (options_.find_unused || options_.static_graph) {
    engine_->exchange_used(std::vector<uint8_t>(engine_->slots(), 0));
  }
  engine_->wait();
  scale_results();
  opened_ = false;
}

}  // namespace bagua
