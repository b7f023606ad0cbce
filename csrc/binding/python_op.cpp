#include "binding/python_op.h"

#include "base/check.h"

namespace bagua {

namespace py = pybind11;

PythonOp::PythonOp(py::function function) : function_(std::move(function)) {
  description_ =
      concat("PythonOp(", py::str(py::getattr(function_, "__qualname__", function_)), ")");
}

PythonOp::~PythonOp() {
  if (!Py_IsInitialized()) {
    function_.release();  // the interpreter is gone, and with it the object
    return;
  }
  py::gil_scoped_acquire gil;
  function_.release().dec_ref();
}

void PythonOp::run(at::Tensor&, const Round& round) {
  py::gil_scoped_acquire gil;
  try {
    function_(round.bucket);
  } catch (py::error_already_set& error) {
    throw Error(error.what());  // copied here: the original needs the GIL to be destroyed
  }
}

}  // namespace bagua
