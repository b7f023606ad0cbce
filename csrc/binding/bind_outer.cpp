// Local training: the outer step, and what weights and anchor exchange.
#include <pybind11/stl.h>

#include "binding/bindings.h"
#include "op/outer/anchored_weights.h"
#include "op/outer/outer_step.h"

namespace bagua {

namespace py = pybind11;

void bind_outer(py::module_& m) {
  m.def(
      "outer_step",
      [](const Tensors& anchors, const Tensors& momenta, const Tensors& means, double lr, double mu,
         bool nesterov) {
        outer_step(anchors, momenta, means, {.lr = lr, .momentum = mu, .nesterov = nesterov});
      },
      py::arg("anchors"), py::arg("momenta"), py::arg("means"), py::kw_only(), py::arg("lr"),
      py::arg("mu"), py::arg("nesterov"), ReleaseGil());
  m.def("inner_product", &inner_product, py::arg("a"), py::arg("b"), ReleaseGil());
  m.def(
      "take_deltas",
      [](const Tensors& weights, const Tensors& anchors, Tensors deltas, Tensors launched) {
        take_deltas(weights, anchors, deltas, launched);
      },
      py::arg("weights"), py::arg("anchors"), py::arg("deltas"), py::arg("launched") = Tensors{},
      ReleaseGil());
  m.def(
      "take_anchors",
      [](Tensors weights, const Tensors& anchors) { take_anchors(weights, anchors); },
      py::arg("weights"), py::arg("anchors"), ReleaseGil());
  m.def(
      "merge_anchors",
      [](Tensors weights, const Tensors& anchors, const Tensors& launched) {
        merge_anchors(weights, anchors, launched);
      },
      py::arg("weights"), py::arg("anchors"), py::arg("launched"), ReleaseGil());
}

}  // namespace bagua
