// From autograd to the engine without Python: adopt a gradient, mark its slot, finish the round.
#pragma once

#include <atomic>
#include <exception>
#include <functional>
#include <memory>
#include <string>
#include <vector>

#include <ATen/core/Tensor.h>

#include "engine/engine.h"

namespace bagua {

struct GradientPathOptions {
  bool install_hooks;  // false: the caller adopts and marks (a user's own backward hook)
  bool find_unused;    // ranks exchange which parameters were used; see finish()
  // Called when a backward over all leaves reaches the module's output in an open round, before it
  // has made a gradient. What it throws ends that backward, and the round stays open. Null:
  // nothing.
  std::function<void()> before_backward;
  // Each is called at most once per backward, in the thread that called backward(), after every
  // gradient slot has been marked. Null: wait for the engine.
  std::function<void()> after_backward;
  // Names of parameters without gradient, the first time there are any.
  std::function<void(const std::vector<std::string>&)> on_unused;
  // Called with every error on its way through autograd, whose engine knows few types: may throw
  // it as another that the caller of backward() recognises. Null: thrown as it is.
  std::function<void(const std::exception_ptr&)> on_error;
};

// Note [Adopt]
// A gradient is a view of its bucket. If autograd hands over another tensor, as it does after
// zero_grad(set_to_none=True), the hook copies it in and points .grad at the bucket. Without this,
// ranks diverge silently.
//
// Note [End of backward]
// Communication is complete when backward() returns. The completing callback is queued in the
// outermost graph task, by a hook on the tensors of the root module's output; a callback queued
// from a parameter's hook would fire after the first inner backward of a reentrant checkpoint.
// torch.autograd.grad() passes the same hook without accumulating anything, so the callback
// finishes a round only if a slot was marked or the backward was one over all leaves. A model whose
// output holds no tensor finishes with its last slot instead. Gradients of a backward that misses
// the output wait for the one that passes it; if the next round begins instead, it raises.
//
// Note [Every parameter answers]
// A slot that backward did not reach contributes the gradient it holds (accumulated earlier, under
// no_sync) or zeros, in its bucket's turn. Never a hang, never a silent skip.
//
// Thread safety: hooks run on autograd's threads; the other methods on the training thread.
// Ownership: hooks hold the path weakly, so dropping it removes them.
class GradientPath : public std::enable_shared_from_this<GradientPath> {
 public:
  static std::shared_ptr<GradientPath> make(std::shared_ptr<Engine> engine,
                                            GradientPathOptions options);
  ~GradientPath();

  // Called before a forward that will be followed by a synchronising backward. What the buckets
  // hold after communication is multiplied by `result_scale`: a mean over fewer ranks than there
  // are, when some have run out of inputs.
  void begin_round(float grad_scale, double result_scale = 1.0);

  // Called after that forward with the tensors of its output.
  void watch(const std::vector<at::Tensor>& outputs);

  // Inside no_sync(): backward accumulates into the buckets and marks nothing.
  void set_sync(bool enabled) { sync_ = enabled; }

  // For a user's own backward hook: Note [Adopt] for one slot.
  void adopt(SlotId slot);

  void remove_hooks();

 private:
  struct GradSlot;
  struct Hook;
  enum Phase { kIdle, kArmed, kActive };

  GradientPath(std::shared_ptr<Engine> engine, GradientPathOptions options);
  void install_hooks();
  template <typename Body>
  void under_autograd(Body body);
  bool adopt(GradSlot& slot, double scale);
  void on_gradient(GradSlot& slot);
  void on_backward(int64_t round);
  void finish(bool whole_graph);
  std::vector<GradSlot*> mark_remaining();
  void scale_results();
  void restore_gradients(const std::vector<GradSlot*>& undefined);

  std::shared_ptr<Engine> engine_;
  GradientPathOptions options_;
  std::vector<std::unique_ptr<GradSlot>> slots_;
  std::atomic<int> phase_{kIdle};
  std::atomic<size_t> fired_{0};
  std::atomic<bool> sync_{true};
  std::atomic<bool> astray_{false};  // a gradient came while no backward through the output ran
  double result_scale_ = 1.0;
  bool watched_ = false;
  bool warned_unused_ = false;
};

}  // namespace bagua
