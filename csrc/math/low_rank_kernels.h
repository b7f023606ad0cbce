// The interface of low-rank products on a device.
#pragma once

#include <cstdint>
#include <memory>

#include "math/element_types.h"
#include "math/low_rank_plan.h"

namespace bagua {

// Dtypes of a bucket. Messages and memory are f64 for f64, else f32; so is what is computed in.
enum class LowRankDType : uint8_t { kFloat32, kFloat16, kBFloat16, kFloat64 };

// Calls function(W{}, T{}): W is what is computed in, T an element of the bucket.
template <typename Function>
decltype(auto) visit_low_rank(LowRankDType dtype, Function&& function) {
  switch (dtype) {
    case LowRankDType::kFloat16:
      return function(float{}, Half{});
    case LowRankDType::kBFloat16:
      return function(float{}, BFloat16{});
    case LowRankDType::kFloat64:
      return function(double{}, double{});
    default:
      return function(float{}, float{});
  }
}

// Memory of a round on the device. T: an element of the bucket; W: of everything else.
struct LowRankMemory {
  LowRankDType dtype;
  void* flat;           // the bucket
  const void* error;    // residuals, as long; null: none
  void* work;           // all M, as long; may be the bucket if W is T
  const void* queries;  // all Q of this round
  void* left;           // first message: all P, then the non-matrix elements
  void* right;          // second message: all Q'
  void* next_queries;   // all Q of the next round
  double* vectors;      // scratch, LowRankTable::matrix_elements()
  void* partials;       // scratch, LowRankTable::partials()
  bool* vanished;       // scratch, LowRankTable::vectors()
  bool* finite;         // whether the result is finite
  double scale;         // the round's grad_scale
  int ranks;
};

// Steps of LowRank (op/low_rank.h) for all matrices and ranges of a plan, each in one launch or
// two. Every sum has one order, whatever the GPU. NaN and infinity pass through to the result.
//
// Thread safety: const and stateless. Ownership: none, all memory is the caller's, on the device.
// Ordering: on `stream`, a cudaStream_t. May fail: Error where CUDA refuses a launch.
class LowRankKernels {
 public:
  virtual ~LowRankKernels() = default;

  // Step 1: M, P, and the non-matrix elements into the first message. finite <- true.
  virtual void project_rows(const LowRankPlan& plan, const LowRankMemory& memory,
                            void* stream) const = 0;

  // Step 3, for P: as orthonormalise() of thin_factors.h. Vectors of a P that is not finite become
  // NaN.
  virtual void orthonormalise(const LowRankPlan& plan, const LowRankMemory& memory,
                              void* stream) const = 0;

  // Step 3, for Q'.
  virtual void project_columns(const LowRankPlan& plan, const LowRankMemory& memory,
                               void* stream) const = 0;

  // Step 4 behind the sum, and step 5 for Q: Q' becomes the mean, and the next Q.
  virtual void keep_queries(const LowRankPlan& plan, const LowRankMemory& memory,
                            void* stream) const = 0;

  // Step 5, for the bucket and the residuals. finite <- false where an element is not.
  virtual void reconstruct(const LowRankPlan& plan, const LowRankMemory& memory,
                           void* stream) const = 0;
};

// Null if this build has no CUDA kernels.
std::shared_ptr<const LowRankKernels> make_cuda_low_rank_kernels();

}  // namespace bagua
