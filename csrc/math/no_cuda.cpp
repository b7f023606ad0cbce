// In place of the CUDA kernels where the build has no CUDA.
#include "math/low_rank_kernels.h"

namespace bagua {

std::shared_ptr<const LowRankKernels> make_cuda_low_rank_kernels() { return nullptr; }

}  // namespace bagua
