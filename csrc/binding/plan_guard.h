// Compares a module with its parameters at the wrap.
#pragma once

#include <string>
#include <unordered_map>
#include <unordered_set>
#include <vector>

#include <pybind11/stl.h>
#include <torch/csrc/utils/pybind.h>

namespace bagua {

// Note [Plan guard]
// Hooks sit on the parameters that existed at the wrap. A parameter that is replaced
// (load_state_dict(assign=True)), unfrozen, added, moved or cast afterwards would train
// unsynchronised without an error, so every forward with gradients compares the module with the
// snapshot. Freezing is no difference: a frozen parameter receives no gradient, which is noticed.
// Unfreezing is one that some algorithms follow: accept_unfrozen(). Neither is another name or
// place of the same parameter object (pruning, a parametrization), whose hook stays: moved() and
// accept_places().
//
// Holds no reference to the module: the caller passes the same dictionaries to every call, in the
// same order, until accept_places() has taken others. Needs the GIL.
class PlanGuard {
 public:
  // `names`: of the modules; `dicts`: for each its _parameters and its _modules, alternating.
  // `ignored`: names of parameters and modules that may change.
  PlanGuard(std::vector<std::string> names, const pybind11::list& dicts,
            const std::unordered_set<std::string>& ignored);

  // The first difference in words, or an empty string. `unfreezing`: a parameter that was frozen at
  // the wrap and is trainable now is none.
  std::string difference(const pybind11::list& dicts, bool unfreezing = false) const;

  // Whether a place holds another parameter or module than expected, or places were added or
  // removed. Cheap where not.
  bool moved(const pybind11::list& dicts) const;

  // Expects from now on the places of the module as it is now, and returns true, if they hold the
  // parameters that were expected and no other. Parameters are compared with what they were at the
  // wrap. The arguments are those of the constructor.
  bool accept_places(std::vector<std::string> names, const pybind11::list& dicts,
                     const std::unordered_set<std::string>& ignored);

  // Trainable parameters count as if they had been so at the wrap. The caller communicates them.
  void accept_unfrozen();

  // The first parameter that was trainable at the wrap, is no expert, and whose gradient torch
  // communicates too, or an empty string: Note [Torch's reducer].
  std::string reduced_by_torch() const;

  // Whether a backward through the module as it is now can reach a parameter that is trainable. Not
  // where all are frozen, nor where functional_call() has put leaves in place of all;
  // other tensors may have been computed from the parameters. True if none was trainable.
  bool trains(const pybind11::list& dicts) const;

 private:
  struct Entry {
    std::string name;
    PyObject* object;   // compared by identity only; null if anything may be there
    at::Tensor tensor;  // undefined for a module or None
    bool requires_grad;
    bool expert;  // each rank has its own, which bagua leaves alone
    at::ScalarType dtype;
    at::Device device;
    std::vector<int64_t> sizes;
  };
  using Entries = std::vector<std::vector<Entry>>;  // one list per dictionary
  static Entries entries_of(const std::vector<std::string>& names, const pybind11::list& dicts,
                            const std::unordered_set<std::string>& ignored);
  static std::unordered_map<PyObject*, const Entry*> parameters_of(const Entries& all);
  std::string compare(const Entry& entry, PyObject* object, bool unfreezing) const;
  static bool reaches(const Entry& entry, PyObject* object);

  std::vector<std::string> names_;
  Entries expected_;
};

}  // namespace bagua
