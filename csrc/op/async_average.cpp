#include "op/async_average.h"

#include <algorithm>
#include <utility>

#include <ATen/ops/empty.h>
#include <ATen/ops/full.h>
#include <ATen/record_function.h>

#include "base/check.h"
#include "comm/device_stream.h"
#include "op/tensors/all_finite.h"
#include "op/tensors/arithmetic_dtype.h"
#include "op/tensors/numel_at_once.h"

namespace bagua {
namespace {

// Elements updated together on CPU: few enough for the second-level cache.
constexpr int64_t kCachedNumel = 65536;

at::Device device_of(const std::vector<at::Tensor>& weights) {
  BAGUA_CHECK_ARG(!weights.empty(), "AsyncAverage needs a communicator, a gate and weights.");
  return weights.front().device();
}

}  // namespace

AsyncAverage::AsyncAverage(std::shared_ptr<Communicator> communicator,
                           std::vector<at::Tensor> weights, std::shared_ptr<WeightGate> gate)
    : communicator_(std::move(communicator)),
      gate_(std::move(gate)),
      trained_(device_of(weights)),
      averaged_(device_of(weights)) {
  BAGUA_CHECK_ARG(communicator_ && gate_, "AsyncAverage needs a communicator, a gate and weights.");
  for (at::Tensor& flat : weights) {
    BAGUA_CHECK_ARG(flat.device() == weights.front().device(),
                    "AsyncAverage: weights must be on one device, not on ",
                    weights.front().device().str(), " and ", flat.device().str(), ".");
    BAGUA_CHECK_ARG(flat.is_contiguous() && flat.is_floating_point(),
                    "AsyncAverage: weights must be contiguous and floating, not ", flat.toString(),
                    ".");
    const auto options = flat.options().dtype(arithmetic_dtype(flat.scalar_type()));
    parts_.push_back({flat, at::empty(flat.sizes(), options), at::empty(flat.sizes(), options)});
  }
}

template <typename Body>
void AsyncAverage::in_the_gate(Body body) {
  BAGUA_CHECK(gate_->lane_enter(), "asynchronous averaging was stopped on this rank.");
  try {
    trained_.block_current_stream();
    for (Part& part : parts_) body(part);
    averaged_.mark_current_stream();
  } catch (...) {
    gate_->lane_leave();
    throw;
  }
  gate_->lane_leave();
}

PeriodicOp::Made AsyncAverage::run(bool wants_to_stop) {
  // 1.
  at::Tensor stop =
      at::full({1}, wants_to_stop ? 1 : 0, at::TensorOptions().dtype(at::kByte).device(device()));
  communicator_->all_reduce(stop, ReduceOp::kMin);
  if (stop.item<uint8_t>() != 0) {
    communicator_->check();  // an aborted all-reduce has left this rank's own wish
    return Made::kNothing;
  }
  // 2.
  {
    RECORD_FUNCTION("bagua::AsyncAverage::snapshot", {});
    in_the_gate([](Part& part) { part.snapshot.copy_(part.weights); });
  }
  // 3.
  for (Part& part : parts_) {
    part.mean.copy_(part.snapshot);
    communicator_->all_reduce(part.mean, ReduceOp::kAvg);
  }
  wait_for_current_stream(device());
  communicator_->check();
  const bool finite = !device().is_cpu() || averages_are_finite();
  // 4.
  RECORD_FUNCTION("bagua::AsyncAverage::apply", {});
  in_the_gate(apply);
  return finite ? Made::kAverage : Made::kNonFinite;
}

void AsyncAverage::training_enters() { averaged_.block_current_stream(); }

void AsyncAverage::apply(Part& part) {
  const bool narrow = part.weights.scalar_type() != part.mean.scalar_type();
  const int64_t most = numel_at_once(part.weights, kCachedNumel);
  for (int64_t first = 0; first < part.weights.numel(); first += most) {
    const int64_t numel = std::min(most, part.weights.numel() - first);
    at::Tensor weights = part.weights.narrow(0, first, numel);
    at::Tensor snapshot = part.snapshot.narrow(0, first, numel);
    at::Tensor mean = part.mean.narrow(0, first, numel);
    if (narrow) {
      weights.copy_(weights.to(mean.scalar_type()).sub_(snapshot).add_(mean));
    } else {
      weights.sub_(snapshot).add_(mean);
    }
  }
}

bool AsyncAverage::averages_are_finite() const {
  return std::all_of(parts_.begin(), parts_.end(),
                     [](const Part& part) { return all_finite(part.mean); });
}

at::Device AsyncAverage::device() const { return parts_.front().weights.device(); }

int64_t AsyncAverage::bytes() const {
  int64_t total = 0;
  for (const Part& part : parts_) total += static_cast<int64_t>(part.weights.nbytes());
  return total;
}

std::string AsyncAverage::describe() const {
  return concat("AsyncAverage(ranks ", communicator_->group().size, ")");
}

}  // namespace bagua
