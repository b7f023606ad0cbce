#include "engine/plan_guard.h"

#include <utility>

#include "base/check.h"
#include "engine/torch_reducer.h"

namespace bagua {
namespace {

std::string full_name(const std::string& module, const char* key) {
  return concat(module, module.empty() ? "" : ".", key);
}

// Whether a backward reaches the parameter of an entry through what holds its place now: itself,
// or a tensor that was computed, maybe from it.
bool reaches(const void* expected, const Place& place) {
  return place.object == expected || !place.tensor || !place.tensor->is_leaf();
}

}  // namespace

PlanGuard::PlanGuard(std::vector<std::string> names, const Places& places,
                     const std::unordered_set<std::string>& ignored, PlaceQuestions questions)
    : questions_(questions),
      names_(std::move(names)),
      expected_(entries_of(names_, places, ignored)) {}

PlanGuard::Entries PlanGuard::entries_of(const std::vector<std::string>& names,
                                         const Places& places,
                                         const std::unordered_set<std::string>& ignored) const {
  Entries all(places.size());
  for (size_t i = 0; i < places.size(); ++i) {
    for (const Place& place : places[i]) {
      Entry entry{.name = full_name(names[i / 2], place.key),
                  .object = place.object,
                  .tensor = {},
                  .requires_grad = false,
                  .expert = false,
                  .dtype = at::kFloat,
                  .device = at::kCPU,
                  .sizes = {}};
      if (ignored.count(entry.name) > 0) {
        entry.object = nullptr;
      } else if (place.tensor) {
        entry.tensor = *place.tensor;
        entry.requires_grad = entry.tensor.requires_grad();
        entry.expert = questions_.is_expert(place.object);
        entry.dtype = entry.tensor.scalar_type();
        entry.device = entry.tensor.device();
        entry.sizes = entry.tensor.sizes().vec();
      }
      all[i].push_back(std::move(entry));
    }
  }
  return all;
}

std::unordered_map<const void*, const PlanGuard::Entry*> PlanGuard::parameters_of(
    const Entries& all) {
  std::unordered_map<const void*, const Entry*> parameters;
  for (const auto& entries : all) {
    for (const Entry& entry : entries) {
      if (entry.tensor.defined()) parameters.emplace(entry.object, &entry);
    }
  }
  return parameters;
}

// A tensor that is not a parameter is put in its place by torch.func.functional_call(), for one
// forward.
bool PlanGuard::replaced(const Entry& entry, const Place& place) const {
  if (entry.object == nullptr || entry.object == place.object) return false;
  return !entry.tensor.defined() || !place.tensor || questions_.is_parameter(place.object);
}

bool PlanGuard::moved(const Places& places) const {
  for (size_t i = 0; i < expected_.size(); ++i) {
    const std::span<const Place> now = places[i];
    if (now.size() != expected_[i].size()) return true;
    for (size_t k = 0; k < now.size(); ++k) {
      if (replaced(expected_[i][k], now[k])) return true;
    }
  }
  return false;
}

bool PlanGuard::accept_places(std::vector<std::string> names, const Places& places,
                              const std::unordered_set<std::string>& ignored) {
  Entries now = entries_of(names, places, ignored);
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

std::string PlanGuard::compare(const Entry& entry, const Place& place, bool unfreezing) const {
  if (replaced(entry, place)) {
    return concat(
        "'", entry.name, "' was replaced by another ",
        entry.tensor.defined() ? "tensor (load_state_dict(assign=True) does this)" : "object");
  }
  if (place.object != entry.object || !entry.tensor.defined()) return "";
  const at::Tensor& now = *place.tensor;
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

std::string PlanGuard::difference(const Places& places, bool unfreezing) const {
  for (size_t i = 0; i < expected_.size(); ++i) {
    const std::span<const Place> now = places[i];
    for (size_t k = 0; k < now.size(); ++k) {
      if (k == expected_[i].size()) {
        return concat("'", full_name(names_[i / 2], now[k].key), "' is new");
      }
      std::string found = compare(expected_[i][k], now[k], unfreezing);
      if (!found.empty()) return found;
    }
    if (now.size() < expected_[i].size()) {
      return concat("'", expected_[i][now.size()].name, "' was removed");
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

bool PlanGuard::trains(const Places& places) const {
  bool some = false;
  for (size_t i = 0; i < expected_.size(); ++i) {
    const std::span<const Place> now = places[i];
    for (size_t k = 0; k < expected_[i].size(); ++k) {
      if (k == now.size()) return true;  // difference() says it
      const Entry& entry = expected_[i][k];
      const bool trainable = entry.tensor.defined() && entry.tensor.requires_grad();
      const bool ours = entry.requires_grad || !entry.expert;
      if (trainable && ours && reaches(entry.object, now[k])) return true;
      some |= entry.requires_grad;
    }
  }
  return !some;
}

}  // namespace bagua
