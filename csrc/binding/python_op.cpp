#include "binding/python_op.h"

#include "base/check.h"
#include "binding/bindings.h"

namespace bagua {

namespace py = pybind11;

PythonOp::PythonOp(const py::function& function)
    : function_(shared_with_gil(function)),
      description_(
          concat("PythonOp(", py::str(py::getattr(function, "__qualname__", function)), ")")) {}

void PythonOp::run(at::Tensor&, const Round& round) {
  py::gil_scoped_acquire gil;
  try {
    (*function_)(round.bucket);
  } catch (py::error_already_set& error) {
    throw Error(error.what());  // copied here: the original needs the GIL to be destroyed
  }
}

}  // namespace bagua
