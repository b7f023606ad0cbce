// Averaging during training. Every call that can block releases the GIL.
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "binding/bindings.h"
#include "binding/interruptible.h"
#include "engine/periodic.h"
#include "op/async_average.h"

namespace bagua {

namespace py = pybind11;

void bind_periodic(py::module_& m) {
  py::class_<PeriodicLane, std::shared_ptr<PeriodicLane>>(m, "PeriodicLane")
      .def(py::init([](std::shared_ptr<CountingCommunicator> communicator,
                       std::vector<at::Tensor> weights, std::string name, double interval_s,
                       double timeout_s, std::shared_ptr<FailureBoard> board,
                       std::shared_ptr<ManualClock> clock) {
             auto gate = std::make_shared<WeightGate>();
             auto op = std::make_shared<AsyncAverage>(communicator, std::move(weights), gate);
             LaneOptions lane{.name = std::move(name),
                              .control = nullptr,
                              .ops = {std::move(communicator)},
                              .board = std::move(board),
                              .check_signals = check_signals};
             PeriodicLaneOptions options{.interval = to_milliseconds(interval_s),
                                         .timeout = to_milliseconds(timeout_s)};
             if (clock) options.clock = std::move(clock);
             return std::shared_ptr<PeriodicLane>(
                 new PeriodicLane(std::move(op), std::move(gate), std::move(lane),
                                  std::move(options)),
                 delete_without_gil<PeriodicLane>);
           }),
           py::arg("communicator"), py::arg("weights"), py::kw_only(), py::arg("name"),
           py::arg("interval_s"), py::arg("timeout_s"), py::arg("board").none(true) = py::none(),
           py::arg("clock").none(true) = py::none())
      .def("resume", &PeriodicLane::resume, ReleaseGil())
      .def("ask_to_pause", &PeriodicLane::ask_to_pause, ReleaseGil())
      .def(
          "pause",
          [](PeriodicLane& lane, std::optional<double> limit_s) {
            return lane.pause(limit_s ? std::optional(to_milliseconds(*limit_s)) : std::nullopt);
          },
          py::arg("limit_s") = py::none(), ReleaseGil())
      .def("check", &PeriodicLane::check, ReleaseGil())
      .def("enter", &PeriodicLane::enter, ReleaseGil())
      .def("leave", &PeriodicLane::leave, ReleaseGil())
      .def("stop", &PeriodicLane::stop, ReleaseGil())
      .def_property_readonly("inside", &PeriodicLane::inside)
      .def_property_readonly("at_gate", &PeriodicLane::at_gate)
      .def_property_readonly("running", &PeriodicLane::running)
      .def("stats", [](const PeriodicLane& lane) { return stats_dict(lane.stats()); });
}

}  // namespace bagua
