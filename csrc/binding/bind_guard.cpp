// Ops that a guard puts around others.
#include <optional>

#include <pybind11/stl.h>

#include "binding/bindings.h"
#include "op/guard/fallback.h"
#include "op/guard/mean_of_weights.h"
#include "op/guard/sampled.h"
#include "op/guard/settle_residuals.h"

namespace bagua {

namespace py = pybind11;

void bind_guard(py::module_& m) {
  py::class_<Sampled, BucketOp, std::shared_ptr<Sampled>>(m, "Sampled")
      .def(py::init<std::shared_ptr<BucketOp>>(), py::arg("inner"))
      .def("request", &Sampled::request, py::arg("places"))
      .def(
          "take",
          [](Sampled& op) -> std::optional<std::tuple<at::Tensor, at::Tensor, float>> {
            std::optional<BucketSample> sample = op.take();
            if (!sample) return std::nullopt;
            return std::make_tuple(sample->before, sample->after, sample->grad_scale);
          },
          "(elements before the op, after it, the round's grad_scale), once.");

  py::class_<Fallback, BucketOp, std::shared_ptr<Fallback>>(m, "Fallback")
      .def(py::init<std::shared_ptr<BucketOp>, std::shared_ptr<BucketOp>>(), py::arg("usual"),
           py::arg("other"))
      .def("use_other", &Fallback::use_other, py::arg("other"));

  py::class_<SettleResiduals, BucketOp, std::shared_ptr<SettleResiduals>>(m, "SettleResiduals")
      .def(py::init([](std::shared_ptr<BucketOp> exact, std::shared_ptr<RoundMemory> memory,
                       const std::optional<std::tuple<size_t, int64_t, int>>& part) {
             std::optional<PartResidual> residual;
             if (part) {
               const auto [index, first, ranks] = *part;
               residual = {.index = index, .first = first, .ranks = ranks};
             }
             return std::make_shared<SettleResiduals>(std::move(exact), std::move(memory),
                                                      residual);
           }),
           py::arg("exact"), py::arg("memory"), py::arg("part") = py::none(),
           "part: (tensor of the memory, first element in the bucket, ranks).");

  py::class_<MeanOfWeights, BucketOp, std::shared_ptr<MeanOfWeights>>(m, "MeanOfWeights")
      .def(py::init<std::shared_ptr<Communicator>, double, std::vector<at::Tensor>>(),
           py::arg("communicator"), py::arg("share"), py::arg("replicas"));
}

}  // namespace bagua
