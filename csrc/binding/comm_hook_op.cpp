#include "binding/comm_hook_op.h"

#include <utility>

#include "base/check.h"

namespace bagua {

namespace py = pybind11;

CommHookOp::CommHookOp(py::function hook, py::object state, HookedBucket bucket)
    : bucket_(std::move(bucket)),
      description_(concat("CommHook(", py::str(py::getattr(hook, "__qualname__", hook)), ")")) {
  // Its destructor takes the GIL, which an interpreter that is gone no longer has.
  hook_ = {new c10d::PythonCommHook(std::move(state), std::move(hook)), [](auto* pointer) {
             if (Py_IsInitialized()) delete pointer;
           }};
}

void CommHookOp::run(at::Tensor& flat, const Round&) {
  std::vector<size_t> lengths;
  std::vector<c10::IntArrayRef> sizes;
  for (const at::Tensor& parameter : bucket_.parameters) {
    lengths.push_back(parameter.numel());
    sizes.push_back(parameter.sizes());
  }
  // A separate storage: a hook that resizes the buffer (batched_powerSGD_hook) must not move the
  // memory that gradients point to.
  at::Tensor lent = at::for_blob(flat.data_ptr(), flat.sizes())
                        .options(flat.options())
                        .deleter([flat](void*) {})
                        .resizeable_storage()
                        .allocator(c10::GetAllocator(flat.device().type()))
                        .make_tensor();
  c10d::GradBucket bucket(bucket_.index, bucket_.count, lent, bucket_.offsets, std::move(lengths),
                          std::move(sizes), bucket_.parameters, std::nullopt);
  at::Tensor result;
  try {
    const auto future = hook_->runHook(bucket);
    future->waitAndThrow();
    result = hook_->parseHookResult(future->value());
  } catch (py::error_already_set& error) {
    py::gil_scoped_acquire gil;
    throw Error(error.what());  // copied here: the original needs the GIL to be destroyed
  }
  BAGUA_CHECK(result.defined() && result.numel() == flat.numel(), "the hook returned ",
              result.defined() ? result.numel() : 0, " elements for a bucket of ", flat.numel(),
              "; its future must hold one tensor like bucket.buffer().");
  if (result.data_ptr() != flat.data_ptr()) flat.copy_(result.view_as(flat));
}

}  // namespace bagua
