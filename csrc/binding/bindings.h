// What each file of this folder adds to the module.
#pragma once

#include <torch/csrc/utils/pybind.h>

namespace bagua {

void bind_codec(pybind11::module_& module);
void bind_comm(pybind11::module_& module);
void bind_op(pybind11::module_& module);
void bind_engine(pybind11::module_& module);
void bind_plan_guard(pybind11::module_& module);

}  // namespace bagua
