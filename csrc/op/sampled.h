// Keeps some elements of a bucket from before and after an op, in rounds that ask for it.
#pragma once

#include <memory>
#include <optional>
#include <string>

#include <ATen/core/Tensor.h>

#include "op/contract/bucket_op.h"

namespace bagua {

// Elements of one round, of the bucket's dtype and on its device.
struct BucketSample {
  at::Tensor before;  // what the op was given
  at::Tensor after;   // what it left in the bucket
  float grad_scale;   // of the round
};

// Wraps another op. Without a request a round costs one comparison. Thread safety: request() and
// take() between rounds, on one thread. Ordering: on a device the elements are gathered on the
// lane's stream; the caller's stream is behind it after Engine::wait(). Ownership: of the samples.
class Sampled final : public BucketOp {
 public:
  explicit Sampled(std::shared_ptr<BucketOp> inner);

  // The next round keeps elements `places` of the bucket: int64, one dimension, on its device.
  void request(at::Tensor places) { places_ = std::move(places); }
  // The sample, once; none where no round has run since the request.
  std::optional<BucketSample> take();

  void run(at::Tensor& flat, const Round& round) override;
  at::Tensor result(const at::Tensor& flat) const override { return inner_->result(flat); }
  std::string describe() const override { return inner_->describe(); }

 private:
  std::shared_ptr<BucketOp> inner_;
  at::Tensor places_;  // undefined: none are asked for
  std::optional<BucketSample> sample_;
};

}  // namespace bagua
