// Deleters for objects whose destructor joins threads.
#pragma once

#include <torch/csrc/utils/pybind.h>

namespace bagua {

// The threads that it joins may want the GIL: a lane inside a PythonOp, or gloo's, dropping the
// last reference to a tensor whose memory is a Python object's. So it is never held meanwhile.
template <typename T>
void delete_without_gil(T* object) {
  if (Py_IsInitialized() && PyGILState_Check()) {
    pybind11::gil_scoped_release no_gil;
    delete object;
  } else {
    delete object;
  }
}

}  // namespace bagua
