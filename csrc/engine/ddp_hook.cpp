#include "engine/ddp_hook.h"

#include <algorithm>
#include <unordered_set>
#include <utility>

#include <torch/csrc/autograd/engine.h>
#include <torch/csrc/autograd/graph_task.h>

#include "base/check.h"

namespace bagua {
namespace {

GradientBucket contents_of(c10d::GradBucket& bucket) {
  GradientBucket found{.index = bucket.getIndex(),
                       .buffer = bucket.getBuffer(),
                       .parameters = bucket.getParameters(),
                       .offsets = {}};
  BAGUA_CHECK(found.buffer.layout() == at::kStrided, "bucket ", found.index,
              " holds a gradient of sparse layout, which a communication hook cannot take: pass "
              "sparse=False to the embedding.");
  for (const at::Tensor& gradient : bucket.getGradients()) {
    found.offsets.push_back(gradient.storage_offset() - found.buffer.storage_offset());
  }
  return found;
}

std::vector<const void*> identities(const std::vector<at::Tensor>& parameters) {
  std::vector<const void*> found;
  for (const at::Tensor& parameter : parameters) found.push_back(parameter.unsafeGetTensorImpl());
  return found;
}

// Owned by torch; the hook is shared with the user's handle.
class Registered final : public c10d::CommHookInterface {
 public:
  explicit Registered(std::shared_ptr<DdpHook> hook) : hook_(std::move(hook)) {}

  DynamicLane::Future runHook(c10d::GradBucket& bucket) override { return hook_->run(bucket); }
  at::Tensor parseHookResult(const c10::IValue& result) override {
    hook_->end_round();
    return result.toTensor();
  }

 private:
  const std::shared_ptr<DdpHook> hook_;
};

}  // namespace

DdpHook::DdpHook(std::shared_ptr<DynamicLane> lane, DdpHookOptions options)
    : lane_(std::move(lane)), options_(std::move(options)) {
  BAGUA_CHECK_ARG(lane_ && options_.operations, "a hook needs a lane and operations.");
}

int64_t DdpHook::round() const {
  const std::lock_guard lock(mutex_);
  return round_;
}

void DdpHook::end_round() { ended_ = true; }

void DdpHook::add_samples(float number) {
  const std::lock_guard lock(mutex_);
  next_samples_ = {.number = number + (next_samples_.said ? next_samples_.number : 0),
                   .said = true};
}

void DdpHook::renew(int64_t round) {
  const std::lock_guard lock(mutex_);
  renewed_at_ = round;
}

// Steps:
//   1. wait for the last round, which torch has done unless its backward was left by an exception;
//   2. memories that took no part in it have left it too;
//   3. every memory commits or drops its changes, before new ones join.
void DdpHook::settle() {
  for (const DynamicLane::Future& future : std::exchange(futures_, {})) future->wait();
  if (!options_.outcome || round() == 0) return;
  for (; left_ < members_; ++left_) options_.outcome->leave(round(), {});
  for (const auto& bucket : known_) {
    if (bucket && bucket->memory) bucket->memory->value(0);
  }
}

void DdpHook::begin_round() {
  settle();
  if (options_.grad_scale) grad_scale_ = options_.grad_scale();
  const std::lock_guard lock(mutex_);
  ++round_;
  left_ = 0;
  samples_ = std::exchange(next_samples_, {});
  // A rank that has joined, with zeros.
  if (torch::autograd::get_current_graph_task_id() < 0) samples_ = {.number = 0.0f};
  if (round_ == renewed_at_) known_.clear();
}

const DdpHook::Known& DdpHook::known(const GradientBucket& bucket) {
  if (known_.size() <= bucket.index) known_.resize(bucket.index + 1);
  std::vector<const void*> parameters = identities(bucket.parameters);
  const at::ScalarType dtype = bucket.buffer.scalar_type();
  const std::unique_ptr<Known>& old = known_[bucket.index];
  if (old && old->parameters == parameters && old->offsets == bucket.offsets &&
      old->dtype == dtype && old->numel == bucket.buffer.numel()) {
    return *old;
  }
  BucketOperations made = options_.operations(bucket, round_);
  if (made.memory) ++members_;
  retire(parameters);
  known_[bucket.index] =
      std::make_unique<Known>(Known{.parameters = std::move(parameters),
                                    .offsets = bucket.offsets,
                                    .dtype = dtype,
                                    .numel = bucket.buffer.numel(),
                                    .plan = std::make_shared<JobPlan>(std::move(made.plan)),
                                    .memory = std::move(made.memory)});
  return *known_[bucket.index];
}

// Drops the buckets that had some of the parameters.
void DdpHook::retire(const std::vector<const void*>& parameters) {
  const std::unordered_set<const void*> moved(parameters.begin(), parameters.end());
  for (std::unique_ptr<Known>& bucket : known_) {
    if (!bucket) continue;
    const auto& own = bucket->parameters;
    if (std::any_of(own.begin(), own.end(), [&](auto* one) { return moved.contains(one); })) {
      bucket.reset();
    }
  }
}

DynamicLane::Future DdpHook::run(c10d::GradBucket& torchs) {
  lane_->check();
  const auto index = static_cast<int64_t>(torchs.getIndex());
  const bool first = ended_.exchange(false) || index <= last_index_;
  last_index_ = index;
  try {
    const GradientBucket bucket = contents_of(torchs);
    if (first) begin_round();
    const Known& own = known(bucket);
    if (own.memory) ++left_;
    auto future = lane_->post({.plan = own.plan,
                               .flat = bucket.buffer,
                               .round = round_,
                               .grad_scale = grad_scale_,
                               .samples = samples_});
    futures_.push_back(future);
    if (torchs.isLast()) await_before_torch();
    return future;
  } catch (const std::exception& error) {
    lane_->abort(error.what());  // the other ranks wait for this bucket
    throw;
  }
}

// torch waits for the futures in a callback at the end of the backward that it queues after the
// last bucket, without looking for signals. This callback runs before it. A rank that has joined
// runs the hook outside of a backward, where there are no callbacks.
void DdpHook::await_before_torch() const {
  if (!options_.wait || torch::autograd::get_current_graph_task_id() < 0) return;
  torch::autograd::Engine::get_default_engine().queue_callback(
      [lane = lane_, futures = futures_, wait = options_.wait] { wait(lane, futures); });
}

void register_hook(c10d::Reducer& reducer, std::shared_ptr<DdpHook> hook) {
  reducer.register_comm_hook(std::make_unique<Registered>(std::move(hook)));
}

}  // namespace bagua
