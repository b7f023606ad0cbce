#include "ledger/round_memory.h"

#include <algorithm>
#include <utility>

#include <ATen/ops/empty_like.h>

#include "base/check.h"

namespace bagua {

void RoundOutcome::join() {
  const std::lock_guard lock(mutex_);
  ++members_;
}

void RoundOutcome::leave(int64_t round, const Finite& finite) {
  const std::lock_guard lock(mutex_);
  Entry& entry = entries_[round % 2];
  if (entry.round != round) entry = Entry{.round = round, .flags = {}};
  ++entry.left;
  entry.finite = entry.finite && finite.here;
  if (finite.there.defined()) entry.flags.fetch(finite.there);
}

int64_t RoundOutcome::newest() {
  const std::lock_guard lock(mutex_);
  return std::max(entries_[0].round, entries_[1].round);
}

bool RoundOutcome::finite(int64_t round) {
  const std::lock_guard lock(mutex_);
  Entry& entry = entries_[round % 2];
  if (entry.round != round || entry.left != members_) return false;
  for (const at::Tensor& flag : entry.flags.take()) {
    entry.finite = entry.finite && flag.item<bool>();
  }
  return entry.finite;
}

RoundMemory::RoundMemory(std::vector<at::Tensor> initial, std::shared_ptr<RoundOutcome> outcome)
    : values_(std::move(initial)), outcome_(std::move(outcome)) {
  BAGUA_CHECK_ARG(outcome_, "RoundMemory needs the RoundOutcome of its plan.");
  for (const at::Tensor& value : values_) {
    BAGUA_CHECK_ARG(value.defined() && !value.requires_grad() && value.is_contiguous(),
                    "RoundMemory: tensors must be contiguous and without autograd.");
    next_.push_back(at::empty_like(value));
  }
  outcome_->join();
}

const at::Tensor& RoundMemory::value(size_t i) {
  settle();
  return values_.at(i);
}

at::Tensor& RoundMemory::next(size_t i) {
  settle();
  return next_.at(i);
}

void RoundMemory::leave(int64_t round, const Finite& finite) {
  pending_ = round;
  outcome_->leave(round, finite);
}

void RoundMemory::set(size_t i, const at::Tensor& value) {
  settle();
  const at::Tensor& own = values_.at(i);
  BAGUA_CHECK_ARG(value.sizes() == own.sizes() && value.scalar_type() == own.scalar_type(),
                  "RoundMemory: tensor ", i, " is ", own.toString(), own.sizes(), ", not ",
                  value.toString(), value.sizes(), ".");
  own.copy_(value);
}

void RoundMemory::settle() {
  if (pending_ == 0) return;
  if (outcome_->finite(pending_)) std::swap(values_, next_);
  pending_ = 0;
}

}  // namespace bagua
