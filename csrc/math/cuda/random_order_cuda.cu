#include <algorithm>

#include "base/launch.h"
#include "math/random_order.h"

namespace bagua {

constexpr int kOrderThreads = 256;
constexpr int64_t kMostOrderCtas = 4096;

__global__ void __launch_bounds__(kOrderThreads)
    fill_order(const __grid_constant__ RandomOrder order, int64_t first, int64_t count,
               int64_t* __restrict__ values) {
  const int64_t step = static_cast<int64_t>(gridDim.x) * kOrderThreads;
  for (int64_t i = static_cast<int64_t>(blockIdx.x) * kOrderThreads + threadIdx.x; i < count;
       i += step) {
    values[i] = order.at(first + i);
  }
}

namespace {

class OrderKernelCuda final : public OrderKernel {
 public:
  void fill(const RandomOrder& order, int64_t first, int64_t count, int64_t* values,
            void* stream) const override {
    const int64_t enough = (count + kOrderThreads - 1) / kOrderThreads;
    launch("fill_order", fill_order, std::min(enough, kMostOrderCtas), kOrderThreads, stream, order,
           first, count, values);
  }
};

}  // namespace

std::shared_ptr<const OrderKernel> make_cuda_order_kernel() {
  auto kernel = std::make_shared<const OrderKernelCuda>();
  const LoadsKernels here;
  kernel->fill(RandomOrder(1, 0, 0), 0, 1, nullptr, nullptr);
  return kernel;
}

}  // namespace bagua
