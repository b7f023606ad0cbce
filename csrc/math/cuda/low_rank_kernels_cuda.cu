#include "base/launch.h"
#include "math/cuda/low_rank_bands.cuh"
#include "math/cuda/low_rank_queries.cuh"
#include "math/cuda/orthonormal_kernels.cuh"
#include "math/low_rank_kernels.h"

namespace bagua {

namespace {

// Calls function(LowRankArrays).
template <typename Function>
void with_arrays(const LowRankMemory& memory, Function function) {
  visit_low_rank(memory.dtype, [&]<typename W, typename T>(W, T) {
    function(LowRankArrays<W, T>{.flat = static_cast<T*>(memory.flat),
                                 .error = static_cast<const W*>(memory.error),
                                 .work = static_cast<W*>(memory.work),
                                 .queries = static_cast<const W*>(memory.queries),
                                 .left = static_cast<W*>(memory.left),
                                 .right = static_cast<W*>(memory.right),
                                 .next_queries = static_cast<W*>(memory.next_queries),
                                 .partials = static_cast<W*>(memory.partials),
                                 .finite = memory.finite,
                                 .scale = static_cast<W>(memory.scale),
                                 .unscale = static_cast<W>(1.0 / memory.scale),
                                 .ranks = static_cast<W>(memory.ranks)});
  });
}

class LowRankKernelsCuda final : public LowRankKernels {
 public:
  void project_rows(const LowRankPlan& plan, const LowRankMemory& memory,
                    void* stream) const override {
    with_arrays(memory, [&]<typename W, typename T>(const LowRankArrays<W, T>& arrays) {
      launch("project_bands", project_bands<W, T>, plan.band_count, kBandThreads, stream, plan,
             arrays);
    });
  }

  void orthonormalise(const LowRankPlan& plan, const LowRankMemory& memory,
                      void* stream) const override {
    with_arrays(memory, [&]<typename W, typename T>(const LowRankArrays<W, T>& arrays) {
      launch("orthonormalise_vectors", orthonormalise_vectors<W>, plan.matrices, kVectorThreads,
             stream, plan, arrays.left, memory.vectors, memory.vanished);
    });
  }

  void project_columns(const LowRankPlan& plan, const LowRankMemory& memory,
                       void* stream) const override {
    with_arrays(memory, [&]<typename W, typename T>(const LowRankArrays<W, T>& arrays) {
      launch("project_tiles", project_tiles<W>, plan.tile_count, kProductThreads, stream, plan,
             arrays.work, arrays.left, arrays.partials);
      launch("join_tiles", join_tiles<W>, plan.query_count, kQueryThreads, stream, plan,
             arrays.partials, arrays.right);
    });
  }

  void keep_queries(const LowRankPlan& plan, const LowRankMemory& memory,
                    void* stream) const override {
    with_arrays(memory, [&]<typename W, typename T>(const LowRankArrays<W, T>& arrays) {
      launch("keep_query_pieces", keep_query_pieces<W>, plan.query_count, kQueryThreads, stream,
             plan, memory.vanished, arrays.queries, arrays.right, arrays.next_queries,
             arrays.ranks);
    });
  }

  void reconstruct(const LowRankPlan& plan, const LowRankMemory& memory,
                   void* stream) const override {
    with_arrays(memory, [&]<typename W, typename T>(const LowRankArrays<W, T>& arrays) {
      launch("reconstruct_bands", reconstruct_bands<W, T>, plan.band_count, kBandThreads, stream,
             plan, arrays);
    });
  }
};

}  // namespace

std::shared_ptr<const LowRankKernels> make_cuda_low_rank_kernels() {
  auto kernels = std::make_shared<const LowRankKernelsCuda>();
  const LoadsKernels here;
  LowRankPlan plan{};
  plan.matrices = plan.band_count = plan.tile_count = plan.query_count = 1;
  for (const LowRankDType dtype : {LowRankDType::kFloat32, LowRankDType::kFloat16,
                                   LowRankDType::kBFloat16, LowRankDType::kFloat64}) {
    LowRankMemory memory{};
    memory.dtype = dtype;
    memory.scale = 1;
    kernels->project_rows(plan, memory, nullptr);
    kernels->orthonormalise(plan, memory, nullptr);
    kernels->project_columns(plan, memory, nullptr);
    kernels->keep_queries(plan, memory, nullptr);
    kernels->reconstruct(plan, memory, nullptr);
  }
  return kernels;
}

}  // namespace bagua
