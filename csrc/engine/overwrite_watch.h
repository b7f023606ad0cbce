// Finds weights that are overwritten with values in which the weights have no part.
#pragma once

#include <cstddef>
#include <memory>
#include <vector>

#include <ATen/core/Tensor.h>

namespace bagua {

// From its construction to end() it follows the weights' values through torch's operators on the
// calling thread: what an operator makes of them depends on them. An optimizer that keeps a copy of
// the weights writes values that do not. What runs outside of torch's dispatcher (compiled code,
// kernels of extensions) is not seen, so that its results seem not to depend on the weights.
//
// Thread safety: construction and end() on one thread. Ownership: shares the tensors. Watching
// changes no result. A second watch on a thread replaces the first.
class OverwriteWatch {
 public:
  explicit OverwriteWatch(std::vector<at::Tensor> weights);
  ~OverwriteWatch();
  OverwriteWatch(const OverwriteWatch&) = delete;
  OverwriteWatch& operator=(const OverwriteWatch&) = delete;

  // Ends watching. Numbers of the weights whose memory, which may be another one by now, has no
  // element left that depends on the earlier weights.
  std::vector<size_t> end();

  struct State;

 private:
  std::shared_ptr<State> state_;
};

}  // namespace bagua
