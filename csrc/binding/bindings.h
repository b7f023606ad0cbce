// Parts of the module, one per file of this folder.
#pragma once

#include <chrono>
#include <cstdint>
#include <exception>
#include <functional>
#include <memory>
#include <optional>
#include <utility>

#include <torch/csrc/utils/pybind.h>

#include "base/check.h"
#include "engine/engine.h"
#include "op/wire/frame.h"

namespace bagua {

void bind_codec(pybind11::module_& module);
void bind_comm(pybind11::module_& module);
void bind_op(pybind11::module_& module);
void bind_dynamic(pybind11::module_& module);
void bind_engine(pybind11::module_& module);
void bind_nccl(pybind11::module_& module);
void bind_outer(pybind11::module_& module);
void bind_periodic(pybind11::module_& module);
void bind_plan_guard(pybind11::module_& module);
void bind_sparse(pybind11::module_& module);
void bind_testing(pybind11::module_& module);

// For what joins lane threads, which may be inside a PythonOp or ask a Python store.
template <typename T>
void delete_without_gil(T* object) {
  if (Py_IsInitialized() && PyGILState_Check()) {
    pybind11::gil_scoped_release no_gil;
    delete object;
  } else {
    delete object;
  }
}

// Shares `object`, which refers to objects of Python, among owners that drop it on any thread. Its
// use needs the GIL. After the interpreter's end it is left to the process.
template <typename T>
std::shared_ptr<T> shared_with_gil(T object) {
  return {new T(std::move(object)), [](T* owned) {
            if (!Py_IsInitialized()) return;
            const pybind11::gil_scoped_acquire gil;
            delete owned;
          }};
}

// Throws an error of the core, or of Python, as autograd's engine hands it to the caller of
// backward(); returns for any other. The call that makes it needs the GIL.
std::function<void(const std::exception_ptr&)> as_core_error();

// For bindings that may block.
using ReleaseGil = pybind11::call_guard<pybind11::gil_scoped_release>;

inline Checksum checksum_if(bool wanted) { return wanted ? Checksum::kOn : Checksum::kOff; }

// Python's seconds.
inline std::chrono::milliseconds to_milliseconds(double seconds) {
  return std::chrono::milliseconds(static_cast<int64_t>(seconds * 1000));
}

inline constexpr int64_t kMostElements = int64_t{1} << 32;  // of a sparse message's tensor

inline void check_counts(int64_t k, int64_t n) {
  BAGUA_CHECK_ARG(0 <= k && k <= n && n <= kMostElements, "k = ", k, " of n = ", n,
                  " elements: 0 <= k <= n <= 2**32 must hold.");
}

// A rank's number; None: it says none.
inline RankSamples samples_of(std::optional<float> number) {
  return {.number = number.value_or(1.0f), .said = number.has_value()};
}

// Counters of a communicator, as bagua_stats() shows them.
pybind11::dict traffic_dict(const Traffic& traffic);

// Counters of an engine or a periodic lane, as bagua_stats() shows them.
pybind11::dict stats_dict(const EngineStats& stats);

}  // namespace bagua
