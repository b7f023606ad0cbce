// The plan guard, with the dictionaries of modules for it, and the watch of overwritten weights.
#include <pybind11/stl.h>
#include <torch/csrc/autograd/python_variable.h>

#include "binding/bindings.h"
#include "engine/overwrite_watch.h"
#include "engine/plan_guard.h"
#include "engine/torch_reducer.h"

namespace bagua {

namespace py = pybind11;

namespace {

py::handle python(const void* object) {
  return {static_cast<PyObject*>(const_cast<void*>(object))};
}

constexpr PlaceQuestions kQuestions{
    .is_parameter =
        [](const void* object) {
          const py::object type = py::module_::import("torch.nn").attr("Parameter");
          return py::isinstance(python(object), type);
        },
    .is_expert = [](const void* object) -> bool {
      return py::bool_(py::getattr(python(object), "expert", py::bool_(false)));
    }};

Places places_of(const py::list& dicts) {
  Places places;
  for (const py::handle dict : dicts) {
    PyObject *key = nullptr, *value = nullptr;
    Py_ssize_t position = 0;
    while (PyDict_Next(dict.ptr(), &position, &key, &value)) {
      places.all.push_back(
          {.key = PyUnicode_AsUTF8(key),
           .object = value,
           .tensor = THPVariable_Check(value) ? &THPVariable_Unpack(value) : nullptr});
    }
    places.ends.push_back(places.all.size());
  }
  return places;
}

using Names = std::unordered_set<std::string>;

}  // namespace

void bind_plan_guard(py::module_& m) {
  m.def("has_torch_reducer", &has_torch_reducer, py::arg("parameter"));
  py::class_<PlanGuard>(m, "PlanGuard")
      .def(
          py::init([](std::vector<std::string> names, const py::list& dicts, const Names& ignored) {
            return PlanGuard(std::move(names), places_of(dicts), ignored, kQuestions);
          }),
          py::arg("names"), py::arg("dicts"), py::arg("ignored") = Names())
      .def(
          "difference",
          [](const PlanGuard& guard, const py::list& dicts, bool unfreezing) {
            return guard.difference(places_of(dicts), unfreezing);
          },
          py::arg("dicts"), py::arg("unfreezing") = false)
      .def(
          "moved",
          [](const PlanGuard& guard, const py::list& dicts) {
            return guard.moved(places_of(dicts));
          },
          py::arg("dicts"))
      .def(
          "accept_places",
          [](PlanGuard& guard, std::vector<std::string> names, const py::list& dicts,
             const Names& ignored) {
            return guard.accept_places(std::move(names), places_of(dicts), ignored);
          },
          py::arg("names"), py::arg("dicts"), py::arg("ignored"))
      .def("accept_unfrozen", &PlanGuard::accept_unfrozen)
      .def("reduced_by_torch", &PlanGuard::reduced_by_torch)
      .def(
          "trains",
          [](const PlanGuard& guard, const py::list& dicts) {
            return guard.trains(places_of(dicts));
          },
          py::arg("dicts"));

  py::class_<OverwriteWatch>(m, "OverwriteWatch")
      .def(py::init<std::vector<at::Tensor>>(), py::arg("weights"))
      .def("end", &OverwriteWatch::end);
}

}  // namespace bagua
