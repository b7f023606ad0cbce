// Parts of sparse messages, for tests and benchmarks, and the ops that send them.
#include <ATen/core/Tensor.h>
#include <ATen/ops/empty.h>
#include <torch/csrc/utils/pybind.h>

#include "base/check.h"
#include "binding/bindings.h"
#include "codec/index_code.h"
#include "math/top_k.h"
#include "op/error_feedback_all_reduce.h"
#include "op/sparse.h"

namespace py = pybind11;

namespace bagua {

namespace {

constexpr int64_t kMostElements = int64_t{1} << 32;

void check_flat(const at::Tensor& tensor, const char* name) {
  BAGUA_CHECK_ARG(tensor.device().is_cpu() && tensor.layout() == at::kStrided &&
                      tensor.dim() == 1 && tensor.is_contiguous(),
                  name, " must be a contiguous CPU tensor of one dimension.");
}

void check_counts(int64_t k, int64_t n) {
  BAGUA_CHECK_ARG(0 <= k && k <= n && n <= kMostElements, "k = ", k, " of n = ", n,
                  " elements: 0 <= k <= n <= 2**32 must hold.");
}

at::Tensor empty_indices(int64_t k) { return at::empty({k}, at::TensorOptions(at::kUInt32)); }

at::Tensor select(const at::Tensor& x, int64_t k) {
  // Checks
  check_flat(x, "x");
  check_counts(k, x.numel());
  BAGUA_CHECK_ARG(x.numel() < kMostElements, "x must have less than 2**32 elements.");
  const bool is_double = x.scalar_type() == at::kDouble;
  BAGUA_CHECK_ARG(is_double || x.scalar_type() == at::kFloat,
                  "x must be float32 or float64, it is ", at::toString(x.scalar_type()));

  at::Tensor indices = empty_indices(k);
  auto* out = indices.mutable_data_ptr<uint32_t>();
  const py::gil_scoped_release no_gil;
  if (is_double) {
    top_k(x.const_data_ptr<double>(), x.numel(), k, out);
  } else {
    top_k(x.const_data_ptr<float>(), x.numel(), k, out);
  }
  return indices;
}

at::Tensor pack(const at::Tensor& indices, int64_t n) {
  // Checks
  check_flat(indices, "indices");
  BAGUA_CHECK_ARG(indices.scalar_type() == at::kUInt32, "indices must be uint32, they are ",
                  at::toString(indices.scalar_type()));
  const int64_t k = indices.numel();
  check_counts(k, n);
  const auto* values = indices.const_data_ptr<uint32_t>();
  for (int64_t i = 0; i < k; ++i) {
    BAGUA_CHECK_ARG(values[i] < n && (i == 0 || values[i] > values[i - 1]),
                    "indices must ascend below n = ", n, "; number ", i, " is ", values[i]);
  }

  at::Tensor bytes = at::empty({index_bytes(n, k)}, at::TensorOptions(at::kByte));
  pack_indices(values, k, n, static_cast<std::byte*>(bytes.mutable_data_ptr()));
  return bytes;
}

at::Tensor unpack(const at::Tensor& bytes, int64_t k, int64_t n) {
  // Checks
  check_flat(bytes, "bytes");
  check_counts(k, n);
  BAGUA_CHECK_ARG(bytes.scalar_type() == at::kByte && bytes.numel() == index_bytes(n, k), k,
                  " indices below ", n, " are ", index_bytes(n, k), " uint8, got ", bytes.numel(),
                  " ", at::toString(bytes.scalar_type()));

  at::Tensor indices = empty_indices(k);
  unpack_indices(static_cast<const std::byte*>(bytes.const_data_ptr()), k, n,
                 indices.mutable_data_ptr<uint32_t>());
  return indices;
}

}  // namespace

void bind_sparse(py::module_& m) {
  m.def("top_k", &select, py::arg("x"), py::arg("k"),
        "The indices (uint32, ascending) of the k elements of largest magnitude of x, contiguous\n"
        "float32 or float64 of one dimension on CPU. NaN counts as larger than infinity; of equal\n"
        "magnitudes the lower index comes first. ValueError for anything else.");
  m.def(
      "index_coding",
      [](int64_t n, int64_t k) {
        check_counts(k, n);
        return index_coding_name(choose_index_coding(n, k));
      },
      py::arg("n"), py::arg("k"), "How k indices below n are written: 'packed' or 'bitmap'.");
  m.def("pack_indices", &pack, py::arg("indices"), py::arg("n"),
        "The bytes (uint8) of ascending uint32 indices below n: docs/wire-format.md.");
  m.def("unpack_indices", &unpack, py::arg("bytes"), py::arg("k"), py::arg("n"),
        "The k uint32 indices below n that pack_indices wrote; BaguaError if the bytes are not\n"
        "such indices.");

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
