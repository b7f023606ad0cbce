// Compares a module with its parameters at the wrap.
#pragma once

#include <cstddef>
#include <cstdint>
#include <span>
#include <string>
#include <unordered_map>
#include <unordered_set>
#include <vector>

#include <ATen/core/Tensor.h>

namespace bagua {

// What a dictionary of a module holds under one key. Pointers are Python's.
struct Place {
  const char* key;
  const void* object;        // compared by identity only
  const at::Tensor* tensor;  // null for a module or None
};

// The contents of several dictionaries, one after the other.
struct Places {
  std::vector<Place> all;
  std::vector<size_t> ends;  // of each dictionary, in `all`

  size_t size() const { return ends.size(); }
  std::span<const Place> operator[](size_t dict) const {
    const size_t begin = dict == 0 ? 0 : ends[dict - 1];
    return std::span(all).subspan(begin, ends[dict] - begin);
  }
};

// Questions about the object of a place that holds a tensor.
struct PlaceQuestions {
  bool (*is_parameter)(const void* object);
  bool (*is_expert)(const void* object);
};

// Note [Plan guard]
// Hooks sit on the parameters that existed at the wrap. A parameter that is replaced
// (load_state_dict(assign=True)), unfrozen, added, moved or cast afterwards would train
// unsynchronised without an error, so every forward with gradients compares the module with the
// snapshot. Freezing makes no difference: a frozen parameter receives no gradient, which is
// noticed. Unfreezing is one that some algorithms follow: accept_unfrozen(). Neither is another
// name or place of the same parameter object (pruning, a parametrization), whose hook stays:
// moved() and accept_places().
//
// Holds no reference to the module: the caller reads the same dictionaries for every call, in the
// same order, until accept_places() has taken others. Needs the GIL.
class PlanGuard {
 public:
  // `names`: of the modules; `places`: for each its _parameters and its _modules, alternating.
  // `ignored`: names of parameters and modules that may change.
  PlanGuard(std::vector<std::string> names, const Places& places,
            const std::unordered_set<std::string>& ignored, PlaceQuestions questions);

  // The first difference in words, or an empty string. `unfreezing`: a parameter that was frozen at
  // the wrap and is trainable now is none.
  std::string difference(const Places& places, bool unfreezing = false) const;

  // Whether a place holds another parameter or module than expected, or places were added or
  // removed. Cheap where not.
  bool moved(const Places& places) const;

  // Expects from now on the places of the present module, and returns true, if they hold the
  // parameters that were expected and no other. Parameters are compared with what they were at the
  // wrap. The arguments are those of the constructor.
  bool accept_places(std::vector<std::string> names, const Places& places,
                     const std::unordered_set<std::string>& ignored);

  // Trainable parameters count as if they had been so at the wrap. The caller communicates them.
  void accept_unfrozen();

  // The first parameter that was trainable at the wrap, is not an expert, and whose gradient torch
  // communicates too, or an empty string: Note [Torch's reducer].
  std::string reduced_by_torch() const;

  // Whether a backward through the present module can reach a parameter that is trainable. Not
  // where all are frozen, nor where functional_call() has put leaves in place of all;
  // other tensors may have been computed from the parameters. True if none was trainable.
  bool trains(const Places& places) const;

 private:
  struct Entry {
    std::string name;
    const void* object;  // compared by identity only; null if anything may be there
    at::Tensor tensor;   // undefined for a module or None
    bool requires_grad;
    bool expert;  // each rank has its own, which bagua leaves alone
    at::ScalarType dtype;
    at::Device device;
    std::vector<int64_t> sizes;
  };
  using Entries = std::vector<std::vector<Entry>>;  // one list per dictionary
  Entries entries_of(const std::vector<std::string>& names, const Places& places,
                     const std::unordered_set<std::string>& ignored) const;
  static std::unordered_map<const void*, const Entry*> parameters_of(const Entries& all);
  bool replaced(const Entry& entry, const Place& place) const;
  std::string compare(const Entry& entry, const Place& place, bool unfreezing) const;

  PlaceQuestions questions_;
  std::vector<std::string> names_;
  Entries expected_;
};

}  // namespace bagua
