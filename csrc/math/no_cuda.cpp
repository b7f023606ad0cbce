// In place of the CUDA kernels where the build has no CUDA.
#include "math/low_rank_kernels.h"
#include "math/random_order.h"

namespace bagua {

std::shared_ptr<const LowRankKernels> make_cuda_low_rank_kernels() { return nullptr; }

std::shared_ptr<const OrderKernel> make_cuda_order_kernel() { return nullptr; }

}  // namespace bagua
