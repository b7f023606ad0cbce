// Local training: the outer step, what weights and anchor exchange, and chunked sparse means.
#include <utility>

#include <ATen/ops/empty.h>
#include <pybind11/stl.h>

#include "base/check.h"
#include "binding/bindings.h"
#include "op/outer/anchored_weights.h"
#include "op/outer/chunked_sparse.h"
#include "op/outer/outer_step.h"

namespace bagua {

namespace py = pybind11;

namespace {

at::Tensor take_chunks(at::Tensor x, int64_t k) {
  BAGUA_CHECK_ARG(x.is_cpu() && x.dim() == 1 && x.is_contiguous() && x.scalar_type() == at::kFloat,
                  "x must be contiguous float32 of one dimension on the CPU, not ", x.toString(),
                  x.sizes(), ".");
  const ChunkedMessage layout(x.numel(), k);
  at::Tensor message = at::empty({layout.bytes()}, at::TensorOptions(at::kByte));
  auto* const bytes = static_cast<std::byte*>(message.data_ptr());
  const py::gil_scoped_release no_gil;
  for (int64_t chunk = 0; chunk < layout.chunks(); ++chunk) {
    layout.take(chunk, x.mutable_data_ptr<float>(), bytes);
  }
  layout.write_padding(bytes);
  return message.narrow(0, kFrameBytes, layout.bytes() - kFrameBytes);
}

}  // namespace

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

  using Comm = std::shared_ptr<Communicator>;
  using Memory = std::shared_ptr<RoundMemory>;
  py::class_<ChunkedSparse, BucketOp, std::shared_ptr<ChunkedSparse>>(m, "ChunkedSparse")
      .def(py::init([](Comm communicator, std::shared_ptr<Scratch> scratch, int64_t k, double decay,
                       int64_t numel, Memory memory, bool checksum) {
             const ChunkedSparseRule rule{.k = k, .decay = decay, .numel = numel};
             return std::make_shared<ChunkedSparse>(std::move(communicator), std::move(scratch),
                                                    rule, std::move(memory), checksum_if(checksum));
           }),
           py::arg("communicator"), py::arg("scratch"), py::kw_only(), py::arg("k"),
           py::arg("decay"), py::arg("numel"), py::arg("memory"), py::arg("checksum") = false);
  m.attr("SPARSE_CHUNK_NUMEL") = kSparseChunkNumel;
  m.def(
      "chunked_message_bytes",
      [](int64_t numel, int64_t k) { return ChunkedMessage(numel, k).bytes(); }, py::arg("numel"),
      py::arg("k"), "Bytes of the message that ChunkedSparse sends to every other rank.");
  m.def("take_chunks", &take_chunks, py::arg("x"), py::arg("k"),
        "The payload (uint8) of that message for x, float32 of one dimension on the CPU, which\n"
        "becomes what the message loses: docs/wire-format.md.");
}

}  // namespace bagua
