#include "binding/plan_guard.h"

#include <torch/csrc/autograd/python_variable.h>

#include "base/check.h"
#include "binding/bindings.h"
#include "engine/torch_reducer.h"

namespace bagua {

namespace py = pybind11;

namespace {

bool is_parameter(PyObject* object) {
  return THPVariable_Check(object) &&
         PyObject_IsInstance(object, py::module_::import("torch.nn").attr("Parameter").ptr()) == 1;
}

}  // namespace

PlanGuard::PlanGuard(std::vector<std::string> names, const py::list& dicts,
                     const std::unordered_set<std::string>& ignored)
    : names_(std::move(names)), expected_(entries_of(names_, dicts, ignored)) {}

PlanGuard::Entries PlanGuard::entries_of(const std::vector<std::string>& names,
                                         const py::list& dicts,
                                         const std::unordered_set<std::string>& ignored) {
  Entries all;
  for (size_t i = 0; i < dicts.size(); ++i) {
    std::vector<Entry> entries;
    PyObject *key = nullptr, *value = nullptr;
    Py_ssize_t position = 0;
    while (PyDict_Next(py::object(dicts[i]).ptr(), &position, &key, &value)) {
      const std::string& module = names[i / 2];
      Entry entry{.name = concat(module, module.empty() ? "" : ".", PyUnicode_AsUTF8(key)),
                  .object = value,
                  .tensor = {},
                  .requires_grad = false,
                  .expert = false,
                  .dtype = at::kFloat,
                  .device = at::kCPU,
                  .sizes = {}};
      if (ignored.count(entry.name) > 0) {
        entry.object = nullptr;
      } else if (THPVariable_Check(value)) {
        entry.tensor = THPVariable_Unpack(value);
        entry.requires_grad = entry.tensor.requires_grad();
        entry.expert = py::bool_(py::getattr(value, "expert", py::bool_(false)));
        entry.dtype = entry.tensor.scalar_type();
        entry.device = entry.tensor.device();
        entry.sizes = entry.tensor.sizes().vec();
      }
      entries.push_back(std::move(entry));
    }
    all.push_back(std::move(entries));
  }
  return all;
}

std::unordered_map<PyObject*, const PlanGuard::Entry*> PlanGuard::parameters_of(
    const Entries& all) {
  std::unordered_map<PyObject*, const Entry*> parameters;
  for (const auto& entries : all) {
    for (const Entry& entry : entries) {
      if (entry.tensor.defined()) parameters.emplace(entry.object, &entry);
    }
  }
  return parameters;
}

bool PlanGuard::moved(const py::list& dicts) const {
  for (size_t i = 0; i < expected_.size(); ++i) {
    PyObject* dict = PyList_GET_ITEM(dicts.ptr(), static_cast<Py_ssize_t>(i));
    if (static_cast<size_t>(PyDict_Size(dict)) != expected_[i].size()) return true;
    PyObject *key = nullptr, *value = nullptr;
    Py_ssize_t position = 0;
    for (const Entry& entry : expected_[i]) {
      PyDict_Next(dict, &position, &key, &value);
      if (entry.object == nullptr || entry.object == value) continue;
      if (!entry.tensor.defined() || !THPVariable_Check(value) || is_parameter(value)) return true;
    }
  }
  return false;
}

bool PlanGuard::accept_places(std::vector<std::string> names, const py::list& dicts,
                              const std::unordered_set<std::string>& ignored) {
  Entries now = entries_of(names, dicts, ignored);
  const auto before = parameters_of(expected_);
  if (parameters_of(now).size() != before.size()) return false;
  for (auto& entries : now) {
    for (Entry& entry : entries) {
      if (!entry.tensor.defined()) continue;
      const auto known = before.find(entry.object);
      if (known == before.end()) return false;
      std::string name = std::move(entry.name);
      entry = *known->second;
      entry.name = std::move(name);
    }
  }
  names_ = std::move(names);
  expected_ = std::move(now);
  return true;
}

std::string PlanGuard::compare(const Entry& entry, PyObject* object, bool unfreezing) const {
  if (entry.object == nullptr) return "";
  if (object != entry.object) {
    // A tensor that is no parameter: torch.func.functional_call() has put it there for one forward.
    if (entry.tensor.defined() && THPVariable_Check(object) && !is_parameter(object)) return "";
    return concat(
        "'", entry.name, "' was replaced by another ",
        entry.tensor.defined() ? "tensor (load_state_dict(assign=True) does this)" : "object");
  }
  if (!entry.tensor.defined()) return "";
  const at::Tensor& now = THPVariable_Unpack(object);
  if (now.requires_grad() && !entry.requires_grad && !unfreezing) {
    return concat("'", entry.name, "' was unfrozen (requires_grad changed)");
  }
  if (now.scalar_type() != entry.dtype) {
    return concat("'", entry.name, "' changed from ", c10::toString(entry.dtype), " to ",
                  c10::toString(now.scalar_type()));
  }
  if (now.device() != entry.device) {
    return concat("'", entry.name, "' moved from ", entry.device.str(), " to ", now.device().str());
  }
  if (now.sizes() != entry.sizes) {
    return concat("'", entry.name, "' changed its shape to ", now.sizes());
  }
  return "";
}

std::string PlanGuard::difference(const py::list& dicts, bool unfreezing) const {
  for (size_t i = 0; i < expected_.size(); ++i) {
    PyObject* dict = PyList_GET_ITEM(dicts.ptr(), static_cast<Py_ssize_t>(i));
    PyObject *key = nullptr, *value = nullptr;
    Py_ssize_t position = 0;
    size_t count = 0;
    while (PyDict_Next(dict, &position, &key, &value)) {
      if (count == expected_[i].size()) {
        return concat("'", names_[i / 2], names_[i / 2].empty() ? "" : ".", PyUnicode_AsUTF8(key),
                      "' is new");
      }
      std::string found = compare(expected_[i][count++], value, unfreezing);
      if (!found.empty()) return found;
    }
    if (count < expected_[i].size()) {
      return concat("'", expected_[i][count].name, "' was removed");
    }
  }
  return "";
}

void PlanGuard::accept_unfrozen() {
  for (auto& entries : expected_) {
    for (Entry& entry : entries) {
      if (entry.tensor.defined()) entry.requires_grad |= entry.tensor.requires_grad();
    }
  }
}

std::string PlanGuard::reduced_by_torch() const {
  for (const auto& entries : expected_) {
    for (const Entry& entry : entries) {
      if (entry.requires_grad && !entry.expert && has_torch_reducer(entry.tensor)) {
        return entry.name;
      }
    }
  }
  return "";
}

bool PlanGuard::reaches(const Entry& entry, PyObject* object) {
  if (object == entry.object) return true;
  return !THPVariable_Check(object) || !THPVariable_Unpack(object).is_leaf();
}

bool PlanGuard::trains(const py::list& dicts) const {
  bool some = false;
  for (size_t i = 0; i < expected_.size(); ++i) {
    PyObject* dict = PyList_GET_ITEM(dicts.ptr(), static_cast<Py_ssize_t>(i));
    PyObject *key = nullptr, *value = nullptr;
    Py_ssize_t position = 0;
    for (const Entry& entry : expected_[i]) {
      if (!PyDict_Next(dict, &position, &key, &value)) return true;  // difference() says it
      const bool trainable = entry.tensor.defined() && entry.tensor.requires_grad();
      const bool ours = entry.requires_grad || !entry.expert;
      if (trainable && ours && reaches(entry, value)) return true;
      some |= entry.requires_grad;
    }
  }
  return !some;
}

void bind_plan_guard(py::module_& m) {
  py::class_<PlanGuard>(m, "PlanGuard")
      .def(py::init<std::vector<std::string>, const py::list&,
                    const std::unordered_set<std::string>&>(),
           py::arg("names"), py::arg("dicts"),
           py::arg("ignored") = std::unordered_set<std::string>())
      .def("difference", &PlanGuard::difference, py::arg("dicts"), py::arg("unfreezing") = false)
      .def("moved", &PlanGuard::moved, py::arg("dicts"))
      .def("accept_places", &PlanGuard::accept_places, py::arg("names"), py::arg("dicts"),
           py::arg("ignored"))
      .def("accept_unfrozen", &PlanGuard::accept_unfrozen)
      .def("reduced_by_torch", &PlanGuard::reduced_by_torch)
      .def("trains", &PlanGuard::trains, py::arg("dicts"));
}

}  // namespace bagua
