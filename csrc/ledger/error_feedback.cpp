#include "ledger/error_feedback.h"

#include <utility>

#include "base/check.h"
#include "ledger/communications.h"
#include "op/tensors/all_finite.h"

namespace bagua {

ErrorFeedback::ErrorFeedback(const char* op, int64_t numel, std::shared_ptr<RoundMemory> memory,
                             std::shared_ptr<Scratch> scratch)
    : numel_(numel),
      memory_(std::move(memory)),
      feedback_(memory_, kError),
      scratch_(std::move(scratch)) {
  BAGUA_CHECK_ARG(memory_ && memory_->size() == 2, op,
                  " remembers two tensors: the error and the number of communications.");
  const at::Tensor& error = memory_->value(kError);
  BAGUA_CHECK_ARG(error.dim() == 1 && (error.numel() == numel || error.numel() == 0) &&
                      (error.scalar_type() == at::kFloat || error.scalar_type() == at::kDouble),
                  op, ": the error must have ", numel,
                  " elements of float32 or float64, or none, not ", error.numel(), " of ",
                  error.toString(), ".");
  check_communications(memory_->value(kCommunications), op);
  remembers_ = error.numel() > 0;
  dtype_ = error.scalar_type();
}

at::Device ErrorFeedback::device() const { return memory_->value(kError).device(); }

void ErrorFeedback::check(const at::Tensor& flat, const Round& round) const {
  BAGUA_CHECK_ARG(flat.numel() == numel_ && at::isFloatingType(flat.scalar_type()) &&
                      arithmetic_dtype(flat.scalar_type()) == dtype_ &&
                      (!remembers_ || memory_->value(kError).device() == flat.device()),
                  "bucket '", round.bucket, "' (", flat.numel(), " elements of ", flat.toString(),
                  ") does not fit the error that is remembered for it (", numel_, " elements of ",
                  at::toString(dtype_), ").");
}

at::Tensor ErrorFeedback::corrected(const at::Tensor& flat, const Round& round) {
  if (remembers_) return feedback_.corrected(flat, round.grad_scale);
  at::Tensor m = scratch_->get(Scratch::kScaled, numel_, dtype_, flat.device());
  m.copy_(flat);
  if (round.grad_scale != 1.0f) m.div_(round.grad_scale);
  return m;
}

at::Tensor ErrorFeedback::sum(at::Tensor& flat) {
  if (flat.scalar_type() == dtype_) return flat;
  return scratch_->get(Scratch::kSum, numel_, dtype_, flat.device());
}

void ErrorFeedback::finish(at::Tensor& flat, at::Tensor& sum, int ranks, const Round& round) {
  const double divisor = static_cast<double>(ranks) / round.grad_scale;
  if (divisor != 1.0) sum.div_(divisor);
  if (!sum.is_same(flat)) flat.copy_(sum);
  leave(flat, round);
}

void ErrorFeedback::add_and_clear(at::Tensor& flat, const Round& round) {
  if (!remembers_) return;
  add_residual(flat, memory_->value(kError), round.grad_scale);
  memory_->next(kError).zero_();
}

void ErrorFeedback::leave(const at::Tensor& flat, const Round& round) {
  feedback_.leave(round.number, finite_of(flat));
}

}  // namespace bagua
