// Dynamic lanes, and the communication hook of torch's DistributedDataParallel that feeds one.
#include <exception>
#include <functional>
#include <memory>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include <torch/csrc/Exceptions.h>
#include <torch/csrc/utils/pybind.h>

#include "base/check.h"
#include "binding/bindings.h"
#include "binding/interruptible.h"
#include "engine/ddp_hook.h"
#include "engine/jobs.h"

namespace bagua {

namespace py = pybind11;

namespace {

// An error of the core as autograd's engine and torch's bindings hand it to Python; needs no GIL.
class CoreError final : public torch::PyTorchError {
 public:
  CoreError(const char* message, PyObject* type) : PyTorchError(message), type_(type) {}
  PyObject* python_type() override { return type_; }

 private:
  PyObject* type_;  // of the module, which is never unloaded
};

// Throws an exception of Python as autograd's engine hands it to the caller of backward().
[[noreturn]] void throw_to_autograd(py::error_already_set& error) {
  const py::gil_scoped_acquire gil;
  error.restore();
  python_error as_torchs;
  as_torchs.persist();
  throw as_torchs;
}

// A Python callable that C++ may call and drop on any thread.
template <typename Result, typename... Args>
std::function<Result(Args...)> called_with_gil(const std::optional<py::function>& function) {
  if (!function) return nullptr;
  return [owned = shared_with_gil(*function)](Args... args) {
    const py::gil_scoped_acquire gil;
    try {
      return (*owned)(args...).template cast<Result>();
    } catch (py::error_already_set& error) {
      throw_to_autograd(error);
    }
  };
}

// In a callback of autograd's.
void await_before_torch(const std::shared_ptr<DynamicLane>& lane,
                        const std::vector<DynamicLane::Future>& futures) {
  std::optional<py::gil_scoped_release> no_gil;
  if (PyGILState_Check()) no_gil.emplace();
  try {
    lane->wait(futures);
  } catch (py::error_already_set& error) {
    throw_to_autograd(error);
  }
}

// The future of a job.
class Posted {
 public:
  Posted(std::shared_ptr<DynamicLane> lane, DynamicLane::Future future)
      : lane_(std::move(lane)), future_(std::move(future)) {}
  void wait() const {
    lane_->wait({future_});
    future_->waitAndThrow();
  }
  bool done() const { return future_->completed(); }

 private:
  std::shared_ptr<DynamicLane> lane_;
  DynamicLane::Future future_;
};

void bind_lane(py::module_& m) {
  py::enum_<Weighed>(m, "Weighed")
      .value("HERE", Weighed::kHere)
      .value("BEFORE", Weighed::kBefore)
      .value("NOT", Weighed::kNot);

  py::class_<Posted>(m, "Posted")
      .def("wait", &Posted::wait, ReleaseGil())
      .def_property_readonly("done", &Posted::done);

  py::class_<DynamicLane, std::shared_ptr<DynamicLane>>(m, "DynamicLane")
      .def(py::init([](std::string name, uint64_t incarnation, CountingCommunicators ops,
                       std::shared_ptr<CountingCommunicator> control,
                       std::shared_ptr<FailureBoard> board) {
             LaneOptions options{.name = std::move(name),
                                 .control = std::move(control),
                                 .ops = std::move(ops),
                                 .board = std::move(board),
                                 .check_signals = check_signals,
                                 .on_error = as_core_error()};
             return std::shared_ptr<DynamicLane>(new DynamicLane(std::move(options), incarnation),
                                                 delete_without_gil<DynamicLane>);
           }),
           py::kw_only(), py::arg("name"), py::arg("incarnation"), py::arg("ops"),
           py::arg("control"), py::arg("board").none(true) = py::none())
      .def(
          "post",
          [](std::shared_ptr<DynamicLane> lane, const BucketOperations& operations, at::Tensor flat,
             int64_t round, float grad_scale, std::optional<float> samples, Weighed weighed) {
            auto future = lane->post({.plan = std::make_shared<JobPlan>(operations.plan),
                                      .flat = std::move(flat),
                                      .round = round,
                                      .grad_scale = grad_scale,
                                      .samples = samples_of(samples),
                                      .weighed = weighed});
            return Posted(std::move(lane), std::move(future));
          },
          py::arg("operations"), py::arg("flat"), py::kw_only(), py::arg("round"),
          py::arg("grad_scale") = 1.0f, py::arg("samples") = py::none(),
          py::arg("weighed") = Weighed::kHere, ReleaseGil())
      .def("check", &DynamicLane::check, ReleaseGil())
      .def("abort", &DynamicLane::abort, py::arg("reason"), ReleaseGil())
      .def("transport_failed", &DynamicLane::transport_failed, py::arg("reason"), ReleaseGil())
      .def("waits_outside", &DynamicLane::waits_outside, py::arg("text"), ReleaseGil())
      .def_property_readonly("weight", &DynamicLane::weight)
      .def("stop", &DynamicLane::stop, ReleaseGil())
      .def("stats", [](const DynamicLane& lane) { return stats_dict(lane.stats()); });
}

void bind_hook(py::module_& m) {
  py::class_<GradientBucket>(m, "GradientBucket")
      .def(py::init([](size_t index, at::Tensor buffer, std::vector<at::Tensor> parameters,
                       std::vector<int64_t> offsets) {
             return GradientBucket{index, std::move(buffer), std::move(parameters),
                                   std::move(offsets)};
           }),
           py::arg("index"), py::arg("buffer"), py::arg("parameters"), py::arg("offsets"))
      .def_readonly("index", &GradientBucket::index)
      .def_readonly("buffer", &GradientBucket::buffer)
      .def_readonly("parameters", &GradientBucket::parameters)
      .def_readonly("offsets", &GradientBucket::offsets);

  py::class_<DdpHook, std::shared_ptr<DdpHook>>(m, "DdpHook")
      .def(
          py::init([](std::shared_ptr<DynamicLane> lane, const py::function& operations,
                      const std::optional<py::function>& grad_scale,
                      std::shared_ptr<RoundOutcome> outcome) {
            return std::make_shared<DdpHook>(
                std::move(lane),
                DdpHookOptions{
                    .operations = called_with_gil<BucketOperations, const GradientBucket&, int64_t>(
                        operations),
                    .grad_scale = called_with_gil<float>(grad_scale),
                    .outcome = std::move(outcome),
                    .wait = await_before_torch});
          }),
          py::arg("lane"), py::arg("operations"), py::kw_only(),
          py::arg("grad_scale").none(true) = py::none(), py::arg("outcome").none(true) = py::none())
      .def(
          "register",
          [](std::shared_ptr<DdpHook> hook, const std::shared_ptr<c10d::Reducer>& reducer) {
            register_hook(*reducer, std::move(hook));
          },
          py::arg("reducer"))
      .def("add_samples", &DdpHook::add_samples, py::arg("number"))
      .def("settle", &DdpHook::settle, ReleaseGil())
      .def("renew", &DdpHook::renew, py::arg("round"))
      .def_property_readonly("round", &DdpHook::round);
}

}  // namespace

std::function<void(const std::exception_ptr&)> as_core_error() {
  const py::module_ module = py::module_::import("bagua._C");
  PyObject* const plain = module.attr("BaguaError").ptr();
  PyObject* const timeout = module.attr("BaguaTimeoutError").ptr();
  PyObject* const mismatch = module.attr("BaguaMismatchError").ptr();
  return [=](const std::exception_ptr& cause) {
    try {
      std::rethrow_exception(cause);
    } catch (const TimeoutError& error) {
      throw CoreError(error.what(), timeout);
    } catch (const MismatchError& error) {
      throw CoreError(error.what(), mismatch);
    } catch (const Error& error) {
      throw CoreError(error.what(), plain);
    } catch (py::error_already_set& error) {
      throw_to_autograd(error);
    } catch (...) {
      return;
    }
  };
}

void bind_dynamic(py::module_& m) {
  py::register_exception_translator([](std::exception_ptr cause) {
    try {
      if (cause) std::rethrow_exception(cause);
    } catch (CoreError& error) {
      py::set_error(error.python_type(), error.what());
    }
  });

  py::class_<BucketOperations>(m, "BucketOperations")
      .def(py::init([](std::string name, std::string description,
                       std::vector<std::shared_ptr<BucketOp>> ops, double scale,
                       std::shared_ptr<RoundMemory> memory) {
             return BucketOperations{.plan = {.name = std::move(name),
                                              .description = std::move(description),
                                              .ops = std::move(ops),
                                              .scale = scale},
                                     .memory = std::move(memory)};
           }),
           py::arg("name"), py::arg("description"), py::arg("ops"), py::arg("scale") = 1.0,
           py::arg("memory").none(true) = py::none());
  bind_lane(m);
  bind_hook(m);
}

}  // namespace bagua
