// Samples of each rank, and the weight that they give to its values.
#pragma once

#include <cstdint>
#include <span>

#include <ATen/core/Tensor.h>

namespace bagua {

struct Bucket;

// Note [Weights of ranks]
// The result of a round is sum(n_i g_i) / sum(n_i) for the values g_i of P ranks that have n_i
// samples. Ops make means, so each rank multiplies its values by n_i P / sum(n_i) once, before the
// first op of a bucket; a sum becomes P times the weighted mean. These factors have the mean 1, so
// an op that adds a term that is equal on all ranks (UpdateMomentum) stays right. The n_i travel in
// the records that open a round, so they cost no message. A rank that has said no number weighs 1.
// If no rank has said one, or all numbers are equal, no value is multiplied.
// Residuals are what was lost of the multiplied values, in the unit that they are sent in again:
// the sum of the means of f_i g_i over the rounds is that of the results plus the mean of the
// residuals, whatever the factors f_i of each round were.
// A rank with 0 samples contributes zeros, even where its values are not finite (the mean of an
// empty batch). If all ranks have 0, the result is zero.
// In half precision a factor, P at most, makes the values of a rank with many samples overflow
// sooner; the result is then infinite on all ranks, which a GradScaler looks for.
struct RankSamples {
  float number = 1.0f;  // samples or tokens; finite, not negative
  bool said = false;    // false: 1, or 0 of a rank without inputs, which weighs if another has said

  bool operator==(const RankSamples&) const = default;
};

// Made of all ranks' numbers, equal on all ranks.
struct Weighing {
  double ranks = 1.0;
  double total = 1.0;
  bool by_samples = false;  // some rank has said a number

  // The factor for the values of the rank that has `own`.
  double factor(const RankSamples& own) const;
  // Where values were multiplied by the rank's number before.
  double factor_of_multiplied() const;
};

// Throws MismatchError where a number cannot be.
Weighing weighing_of(std::span<const RankSamples> all);

// Multiplies by `factor`; 0 makes zeros of any values.
void weigh(at::Tensor& values, double factor);

// The bucket's values, rows of a sparse gradient included.
void weigh(const Bucket& bucket, double factor);

}  // namespace bagua
