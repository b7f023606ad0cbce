// From autograd to the engine without Python: adopt a gradient, mark its slot, finish the round.
#pragma once

#include <atomic>
#include <exception>
#include <functional>
#include <memory>
#include <mutex>
#include <string>
#include <utility>
#include <vector>

#include <ATen/core/Tensor.h>

#include "engine/engine.h"

namespace bagua {

struct GradientSlot;

struct GradientPathOptions {
  bool install_hooks;  // false: the caller adopts and marks (a user's own backward hook)
  bool find_unused;    // ranks exchange which parameters were used; see finish()
  // Every backward reaches the same parameters, each equally often: Note [Static graph].
  bool static_graph;
  // Parameters whose weights are communicated: no backward may change them.
  std::vector<std::pair<std::string, at::Tensor>> weights;
  // Called by a backward that communicates if begin_round() was not called since the last round;
  // calls it. Null: begin_round(1).
  std::function<void()> open_round;
  // Called when a backward over all leaves reaches the module's output in an open round, before it
  // has made a gradient. An exception from it ends that backward, and the round stays open. Null:
  // nothing.
  std::function<void()> before_backward;
  // Called at most once per backward, after every gradient slot has been marked, in the thread that
  // ends the backward: the one that called backward(), or on a GPU autograd's thread of the device,
  // on the caller's current streams. Null: wait for the engine.
  std::function<void()> after_backward;
  // Called at the end of a communicated backward, when .grad holds the result.
  std::function<void()> after_gradients;
  // Names of parameters without gradient, the first time there are any.
  std::function<void(const std::vector<std::string>&)> on_unused;
  // Name of a parameter that received a gradient from a call past the wrapper, the first time.
  std::function<void(const std::string&)> on_past_wrapper;
  // Called with every error on its way through autograd, whose engine knows few types: may throw
  // it as another that the caller of backward() recognises. Null: thrown unchanged.
  std::function<void(const std::exception_ptr&)> on_error;
};

// Note [Which backward communicates]
// The forward decides, as in torch's DDP: one with gradients enabled and outside of no_sync()
// communicates, in train() and in eval() alike. Every backward that reaches its output is a round.
// So is a backward that reaches every parameter after such a forward, though by another way: a loss
// that the module keeps for itself, a call of a submodule. Until every parameter has been reached
// by another way, their gradients wait for a backward through the output.
// So is every backward that runs inside such a forward, before it has returned: a training step
// that makes its own optimizer steps. It ends with the graph task that it began in.
// In train() the forward opens the round, which hides the agreement behind the forward. In eval()
// the backward opens it, so that a rank that evaluates alone, with gradients enabled, does not wait
// for the others.
//
// Note [End of backward]
// Communication is complete when backward() returns. The completing callback is queued in the
// outermost graph task, by a hook on the tensors of the root module's output; a callback queued
// from a parameter's hook would fire after the first inner backward of a reentrant checkpoint.
// torch.autograd.grad() passes the same hook without accumulating anything, so the callback
// finishes a round only if a slot was marked or the backward was one over all leaves. A model whose
// output holds no tensor with a graph finishes with its last slot instead.
//
// Note [Every parameter answers]
// A slot that backward did not reach contributes the gradient it holds (accumulated earlier, under
// no_sync) or zeros, in its bucket's turn. Never a hang, never a silent skip. A parameter frozen
// since the wrap contributes zeros, and its .grad stays unchanged.
//
// Note [Static graph]
// A parameter shared under reentrant checkpointing receives its gradient in several parts. With
// static_graph the first round counts the parts and sends everything at its end; later rounds send
// a gradient when its last part has come.
//
// Thread safety: hooks run on autograd's threads; the other methods on the training thread.
// Ownership: hooks hold the path weakly, so dropping it removes them.
class GradientPath : public std::enable_shared_from_this<GradientPath> {
 public:
  static std::shared_ptr<GradientPath> make(std::shared_ptr<Engine> engine,
                                            GradientPathOptions options);
  ~GradientPath();

  // Called before every forward with gradients enabled; false inside no_sync().
  void begin_forward(bool communicates);

  // Opens the engine's round, or continues an open one. The buckets' contents after
  // communication are multiplied by `result_scale`: a mean over fewer ranks than there are, when
  // some have run out of inputs.
  // `result_scale`: not used where ranks weigh by samples, of which those without inputs have none.
  void begin_round(float grad_scale, double result_scale = 1.0, const RankSamples& samples = {});

  // Called after a communicating forward with the tensors of its output.
  void watch(const std::vector<at::Tensor>& outputs);

  // Whether a communicated backward is running, on this thread or above it.
  bool in_backward() const;

  // Whether gradients that arrive now are communicated; for a user's own backward hook.
  bool communicating() const { return phase_ == kActive || (expecting_ && !watched_); }

  // For a user's own backward hook: Note [Adopt] for one slot.
  void adopt(SlotId slot);

  // Runs the round of a rank without inputs: every slot is zero and marked; no .grad changes.
  void answer_with_zeros();

  void remove_hooks();

 private:
  struct Hook;
  struct OutputHook;
  enum Phase { kIdle, kActive };

  GradientPath(std::shared_ptr<Engine> engine, GradientPathOptions options);
  void install_hooks();
  template <typename Body>
  void under_autograd(Body body);
  void activate(bool rooted);
  void activate_inside_forward(GradientSlot& first);
  uint64_t frozen_slots() const;  // RoundOpening::frozen
  void forget_bypassed_outputs();
  void queue_finish();
  void on_backward();
  void on_gradient(GradientSlot& slot, const at::Tensor& incoming);
  void leave_for_the_end();
  bool count_hit(GradientSlot& slot);
  void on_bypassed_output(GradientSlot& slot);
  void on_past_wrapper(GradientSlot& slot);
  [[noreturn]] void refuse(const std::string& reason) const;
  void refuse_torch_reducer() const;
  void refuse_unfinished() const;
  void finish();
  void check_versions() const;
  [[noreturn]] void refuse_step(const std::string& parameter) const;
  void mark_remaining();
  void scale_results();
  void restore_gradients();

  std::shared_ptr<Engine> engine_;
  GradientPathOptions options_;
  std::vector<std::unique_ptr<GradientSlot>> slots_;
  std::vector<uint32_t> weight_versions_;  // of options_.weights, when the backward began
  std::mutex opening_;                     // held while a backward opens its round
  std::atomic<int> phase_{kIdle};          // kActive: gradients are on their way into an open round
  std::atomic<bool> expecting_{false};     // a communicating forward came after the last round
  std::atomic<bool> rooted_{false};        // the active backward goes through the output
  bool opened_ = false;                    // begin_round() was called since the last round
  std::atomic<int> partial_task_{-1};  // graph task of a backward that reaches chosen leaves only
  std::atomic<bool> left_{false};      // a slot was reached without a gradient
  std::atomic<size_t> fired_{0};       // slots that backward has reached in the round
  std::atomic<size_t> bypassed_output_{0};  // slots reached since the forward, not by its output
  size_t needed_ = 0;                       // slots whose parameters are not frozen
  bool local_forwards_ = false;             // some forward was inside no_sync()
  bool in_forward_ = false;                 // a communicating forward has not returned
  bool watched_ = false;                    // the forward's output has a graph
  bool counted_ = false;                    // Note [Static graph]: the first round is over
  double result_scale_ = 1.0;
  bool warned_unused_ = false;
  std::atomic<bool> warned_past_wrapper_{false};
};

}  // namespace bagua
