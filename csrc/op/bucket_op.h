// What a bucket does when all of its slots are ready.
#pragma once

#include <cstdint>
#include <string>

#include <ATen/core/Tensor.h>

namespace bagua {

// What a lane tells an op about the round it runs in.
struct Round {
  int64_t step;               // number of the round, from 1
  float grad_scale;           // the factor the values carry (GradScaler); 1 without scaling
  const std::string& bucket;  // name, for error messages
};

// Complete at construction, no flags. Runs on one lane thread at a time; owns shared references to
// the communicators of that lane. `flat` is the contiguous one-dimensional memory of the bucket and
// is changed in place. May throw: the engine stores the error and rethrows it in wait().
class BucketOp {
 public:
  virtual ~BucketOp() = default;
  virtual void run(at::Tensor& flat, const Round& round) = 0;
  virtual std::string describe() const = 0;
};

}  // namespace bagua
