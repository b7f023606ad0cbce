// Operation on a bucket whose slots are all ready.
#pragma once

#include <cstdint>
#include <string>

#include <ATen/core/Tensor.h>

namespace bagua {

// The round that an op runs in.
struct Round {
  int64_t number;             // from 1
  float grad_scale;           // the factor the values carry (GradScaler); 1 without scaling
  const std::string& bucket;  // name, for error messages
};

// A parameter's gradient of whole rows in COO layout (one sparse dimension), on its way through the
// bucket that it has for itself. Ownership: shared by the slot and the op. Thread safety: `local`
// is written before the slot is marked and taken by the op; `result` is read after wait().
struct SparseGradient {
  at::Tensor local;   // this rank's, left unchanged; undefined: zeros
  at::Tensor result;  // the sum or mean, coalesced; separate memory
};

// Throws Error, naming the parameter, unless `gradient` is such a one for a parameter of `sizes`,
// of dtype and device as `like`.
void check_rows(const at::Tensor& gradient, at::IntArrayRef sizes, const at::Tensor& like,
                const std::string& parameter);

// Complete at construction, no flags. Runs on one lane thread at a time; owns shared references to
// the communicators of that lane. `flat` is the contiguous one-dimensional memory of the bucket and
// is changed in place. May throw: the engine stores the error and rethrows it in wait().
class BucketOp {
 public:
  virtual ~BucketOp() = default;
  virtual void run(at::Tensor& flat, const Round& round) = 0;
  // Where run() leaves what the ranks have made of it: in the bucket, unless an op has another
  // place.
  virtual at::Tensor result(const at::Tensor& flat) const { return flat; }
  virtual std::string describe() const = 0;
};

}  // namespace bagua
