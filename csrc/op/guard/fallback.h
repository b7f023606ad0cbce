// Two ops for one bucket, of which one runs.
#pragma once

#include <atomic>
#include <memory>
#include <string>

#include "op/contract/bucket_op.h"

namespace bagua {

// All ranks call use_exact() with the same value between the same rounds, or their messages do not
// fit together. Thread safety: use_exact() between rounds. Describes itself as the usual op: the
// plan is the same for both.
class Fallback final : public BucketOp {
 public:
  Fallback(std::shared_ptr<BucketOp> usual, std::shared_ptr<BucketOp> exact);

  // Which op the next rounds run.
  void use_exact(bool exact) { uses_exact_ = exact; }

  void run(at::Tensor& flat, const Round& round) override;
  std::string describe() const override { return usual_->describe(); }

 private:
  std::shared_ptr<BucketOp> usual_;
  std::shared_ptr<BucketOp> exact_;
  std::atomic<bool> uses_exact_ = false;
};

}  // namespace bagua
