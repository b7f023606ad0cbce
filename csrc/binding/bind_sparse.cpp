// Ops that send sparse messages.
#include <torch/csrc/utils/pybind.h>

#include "binding/bindings.h"
#include "op/error_feedback_all_reduce.h"
#include "op/sparse.h"

namespace py = pybind11;

namespace bagua {

void bind_sparse(py::module_& m) {
  using Comm = std::shared_ptr<Communicator>;
  using Memory = std::shared_ptr<RoundMemory>;
  py::class_<Sparse, BucketOp, std::shared_ptr<Sparse>>(m, "Sparse")
      .def(py::init([](Comm communicator, std::shared_ptr<Scratch> scratch, int64_t numel,
                       int64_t k, Memory memory, bool checksum) {
             const Sparse::Options options{.checksum = checksum_if(checksum), .device = {}};
             return std::make_shared<Sparse>(std::move(communicator), std::move(scratch), numel, k,
                                             std::move(memory), options);
           }),
           py::arg("communicator"), py::arg("scratch"), py::arg("numel"), py::arg("k"),
           py::arg("memory"), py::kw_only(), py::arg("checksum") = false);
  py::class_<ErrorFeedbackAllReduce, BucketOp, std::shared_ptr<ErrorFeedbackAllReduce>>(
      m, "ErrorFeedbackAllReduce")
      .def(py::init<Comm, std::shared_ptr<Scratch>, int64_t, Memory>(), py::arg("communicator"),
           py::arg("scratch"), py::arg("numel"), py::arg("memory"));
  m.def(
      "sparse_message_bytes",
      [](int64_t numel, int64_t k, at::ScalarType values) {
        check_counts(k, numel);
        return SparseMessage(numel, k, values).bytes();
      },
      py::arg("numel"), py::arg("k"), py::arg("values"),
      "Bytes of the message that Sparse sends to every other rank.");
}

}  // namespace bagua
