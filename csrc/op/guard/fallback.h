// Two ops for one bucket, of which one runs.
#pragma once

#include <atomic>
#include <memory>
#include <string>

#include "op/contract/bucket_op.h"

namespace bagua {

// All ranks call use_other() with the same value between the same rounds, or their messages do not
// fit together. Thread safety: use_other() between rounds. Describes itself as the usual op: the
// plan is the same for both. Two ops with residuals share their memory: either one sends what the
// other has left.
class Fallback final : public BucketOp {
 public:
  Fallback(std::shared_ptr<BucketOp> usual, std::shared_ptr<BucketOp> other);

  // Which op the next rounds run.
  void use_other(bool other) { uses_other_ = other; }

  void run(at::Tensor& flat, const Round& round) override;
  std::string describe() const override { return usual_->describe(); }

 private:
  std::shared_ptr<BucketOp> usual_;
  std::shared_ptr<BucketOp> other_;
  std::atomic<bool> uses_other_ = false;
};

}  // namespace bagua
