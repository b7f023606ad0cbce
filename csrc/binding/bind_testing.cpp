// Parts of ops by themselves, and a clock that is turned by hand: for tests and benchmarks.
#include <ATen/core/Tensor.h>
#include <ATen/ops/empty.h>
#include <torch/csrc/utils/pybind.h>

#include "base/check.h"
#include "binding/bindings.h"
#include "codec/index_code.h"
#include "engine/periodic.h"
#include "math/checksum.h"
#include "math/top_k.h"
#include "op/tensors/low_rank_products.h"
#include "op/wire/device_frames.h"

namespace py = pybind11;

namespace bagua {

namespace {

void check_flat(const at::Tensor& tensor, const char* name) {
  BAGUA_CHECK_ARG(tensor.device().is_cpu() && tensor.layout() == at::kStrided &&
                      tensor.dim() == 1 && tensor.is_contiguous(),
                  name, " must be a contiguous CPU tensor of one dimension.");
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

uint64_t checksum_of(const at::Tensor& payload) {
  // Checks
  BAGUA_CHECK_ARG(payload.is_cpu() && payload.scalar_type() == at::kByte &&
                      payload.is_contiguous() && payload.numel() % 4 == 0,
                  "a payload is a contiguous uint8 CPU tensor of a multiple of 4 bytes.");

  const py::gil_scoped_release no_gil;
  return payload_checksum(static_cast<const std::byte*>(payload.const_data_ptr()), payload.numel());
}

}  // namespace

void bind_testing(py::module_& m) {
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
  m.def("payload_checksum", &checksum_of, py::arg("payload"));
  m.def(
      "checksum_on_device",
      [](const at::Tensor& payload) {
        BAGUA_CHECK_ARG(payload.scalar_type() == at::kByte && payload.is_contiguous() &&
                            payload.dim() == 1 && payload.numel() % 4 == 0,
                        "a payload is a contiguous uint8 tensor of one dimension and a multiple of "
                        "4 bytes.");
        return static_cast<uint64_t>(checksum_on_device(payload).item<int64_t>());
      },
      py::arg("payload"), py::call_guard<py::gil_scoped_release>(),
      "payload_checksum() by tensor operations, as ops compute it on devices; for tests.");
  m.def("orthonormalise", &orthonormalise, py::arg("batch"),
        py::call_guard<py::gil_scoped_release>());
  py::class_<ManualClock, std::shared_ptr<ManualClock>>(m, "ManualClock")
      .def(py::init<>())
      .def(
          "turn", [](ManualClock& clock, double seconds) { clock.turn(to_milliseconds(seconds)); },
          py::arg("seconds"))
      .def_property_readonly("readings", &ManualClock::readings)
      .def_property_readonly("waiting", &ManualClock::waiting);
}

}  // namespace bagua
