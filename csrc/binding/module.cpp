// bagua._C: errors, then one call per file.
#include "base/check.h"
#include "binding/bindings.h"

PYBIND11_MODULE(_C, module) {
  namespace py = pybind11;
  module.doc() = "The C++ core of bagua; typed in _C.pyi.";
  static py::exception<bagua::Error> error(module, "BaguaError", PyExc_RuntimeError);
  static py::exception<bagua::TimeoutError> timeout(module, "BaguaTimeoutError", error.ptr());
  static py::exception<bagua::MismatchError> mismatch(module, "BaguaMismatchError", error.ptr());
  py::register_exception_translator([](std::exception_ptr cause) {
    try {
      if (cause) std::rethrow_exception(cause);
    } catch (const bagua::TimeoutError& e) {
      py::set_error(timeout, e.what());
    } catch (const bagua::MismatchError& e) {
      py::set_error(mismatch, e.what());
    } catch (const bagua::Error& e) {
      py::set_error(error, e.what());
    }
  });
  bagua::bind_testing(module);
  bagua::bind_codec(module);
  bagua::bind_comm(module);
  bagua::bind_nccl(module);
  bagua::bind_op(module);
  bagua::bind_engine(module);
  bagua::bind_dynamic(module);
  bagua::bind_outer(module);
  bagua::bind_periodic(module);
  bagua::bind_plan_guard(module);
  bagua::bind_sparse(module);
}
