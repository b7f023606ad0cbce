#include "engine/torch_reducer.h"

#include <algorithm>

#include <torch/csrc/autograd/function.h>
#include <torch/csrc/autograd/utils/lambda_post_hook.h>
#include <torch/csrc/autograd/variable.h>

namespace bagua {

bool has_torch_reducer(const at::Tensor& parameter) {
  const auto node = torch::autograd::impl::try_get_grad_accumulator(parameter);
  if (!node) return false;
  const auto& hooks = node->post_hooks();
  return std::any_of(hooks.begin(), hooks.end(), [](const auto& hook) {
    return dynamic_cast<const torch::autograd::utils::LambdaPostHook*>(hook.get()) != nullptr;
  });
}

}  // namespace bagua
