// A bucket: contiguous memory, the slots in it, and the ops that run when every slot is ready.
#pragma once

#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include <ATen/core/Tensor.h>

#include "op/contract/bucket_op.h"

namespace bagua {

// Source of a slot's values.
enum class Adopt {
  kNone,      // the caller's tensor aliases the bucket already (weights, momentum)
  kGradView,  // the parameter's .grad is made a view of the bucket
  kGradCopy,  // .grad stays where it is: copied in when ready, copied out at the end of backward
  kSparse,    // .grad is handed to the op unchanged, and replaced at the end of backward
};

// Place of one tensor in the flat bucket.
struct Slot {
  std::string name;
  int64_t offset;  // elements from the start of the bucket
  std::vector<int64_t> sizes;
  std::vector<int64_t> strides;  // the parameter's own (channels_last survives)
  Adopt adopt;
  at::Tensor parameter;  // whose .grad it is; undefined for Adopt::kNone
  // Only for Adopt::kSparse, whose slot is one element for form's sake, alone in its bucket.
  std::shared_ptr<SparseGradient> sparse{};

  at::Tensor view(const at::Tensor& flat) const;
};

// Parts that a plan has at most: the ranks' agreement numbers them in 16 bits.
inline constexpr int32_t kMostParts = 65535;

// Immutable once an engine has it.
struct Bucket {
  std::string name;
  at::Tensor flat;  // one-dimensional, padding included
  std::vector<Slot> slots;
  std::vector<std::shared_ptr<BucketOp>> ops;
  // Gradients are multiplied by it on their way into the bucket, when they are about to be sent:
  // dividing there costs nothing, dividing in an op costs another pass over memory.
  double adopt_scale = 1.0;
  int32_t part = 0;  // of the plan: a round may be of one part only

  // Throws std::invalid_argument naming the slot that lies outside, overlaps or has a wrong dtype.
  void check() const;
  // Memory behind the last slot; may be empty.
  at::Tensor padding() const;
};

}  // namespace bagua
