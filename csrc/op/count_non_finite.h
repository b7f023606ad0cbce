// Counts the rounds after which a bucket holds NaN or infinity.
#pragma once

#include <atomic>
#include <cstdint>
#include <memory>
#include <string>

#include <ATen/core/Tensor.h>

#include "op/contract/bucket_op.h"

namespace bagua {

// Thread safety: all methods.
class NonFiniteRounds {
 public:
  void add() { ++count_; }
  int64_t count() const { return count_; }

 private:
  std::atomic<int64_t> count_ = 0;
};

// Wraps another op and checks its result: one pass over memory that has just been written. For the
// last op of a bucket in host memory; on a device the check would wait for the device.
class CountNonFinite final : public BucketOp {
 public:
  // `result`: where `inner` leaves what it did; undefined: in the bucket.
  CountNonFinite(std::shared_ptr<BucketOp> inner, std::shared_ptr<NonFiniteRounds> rounds,
                 at::Tensor result);
  void run(at::Tensor& flat, const Round& round) override;
  std::string describe() const override { return inner_->describe(); }

 private:
  std::shared_ptr<BucketOp> inner_;
  std::shared_ptr<NonFiniteRounds> rounds_;
  at::Tensor result_;
};

}  // namespace bagua
