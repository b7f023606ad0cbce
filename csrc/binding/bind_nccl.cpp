// NCCL for Python: the library of the process and communicators over it.
#include <memory>
#include <string>
#include <utility>

#include <torch/csrc/distributed/c10d/Store.hpp>
#include <torch/csrc/utils/pybind.h>

#include "binding/bindings.h"
#include "binding/interruptible.h"
#include "comm/nccl/nccl_communicator.h"
#include "comm/nccl/nccl_library.h"

namespace py = pybind11;

namespace bagua {
namespace {

// Holder of a communicator for pybind11: its destructor joins a thread and waits for peers.
std::shared_ptr<NcclCommunicator> released_without_gil(std::shared_ptr<NcclCommunicator> made) {
  if (!made) return nullptr;
  auto* kept = new std::shared_ptr<NcclCommunicator>(std::move(made));
  return {kept->get(), [kept](NcclCommunicator*) { delete_without_gil(kept); }};
}

std::shared_ptr<NcclCommunicator> connect(std::shared_ptr<const NcclLibrary> library,
                                          c10::intrusive_ptr<c10d::Store> store, int rank, int size,
                                          at::Device device, double timeout, bool alone_too) {
  const auto made = std::make_shared<std::shared_ptr<NcclCommunicator>>();
  run_interruptibly([=] {
    *made = make_nccl_communicator(
        {library, store, {rank, size}, device, to_milliseconds(timeout), alone_too});
  });
  return released_without_gil(std::move(*made));
}

}  // namespace

void bind_nccl(py::module_& m) {
  m.attr("has_nccl") = has_nccl();

  // pybind11 of today holds no pointers to const; the struct has no setters here.
  py::class_<NcclLibrary, std::shared_ptr<NcclLibrary>>(m, "NcclLibrary")
      .def_static(
          "find",
          [](const std::vector<std::string>& paths) {
            return std::const_pointer_cast<NcclLibrary>(find_nccl_library(paths));
          },
          py::arg("paths"), ReleaseGil())
      .def_static(
          "open",
          [](const std::string& path) {
            return std::const_pointer_cast<NcclLibrary>(open_nccl_library(path));
          },
          py::arg("path"), ReleaseGil())
      .def_readonly("path", &NcclLibrary::path)
      .def_readonly("version", &NcclLibrary::version);

  py::class_<NcclCommunicator, Communicator, std::shared_ptr<NcclCommunicator>>(m,
                                                                                "NcclCommunicator")
      .def(py::init([](std::shared_ptr<NcclLibrary> library, c10::intrusive_ptr<c10d::Store> store,
                       int rank, int size, at::Device device, double timeout, bool alone_too) {
             return connect(std::move(library), std::move(store), rank, size, device, timeout,
                            alone_too);
           }),
           py::arg("library"), py::arg("store"), py::arg("rank"), py::arg("size"),
           py::arg("device"), py::arg("timeout"), py::kw_only(), py::arg("alone_too") = false)
      .def(
          "split",
          [](NcclCommunicator& self, const std::vector<int>& members) {
            return released_without_gil(self.split(members));
          },
          py::arg("members"), ReleaseGil())
      .def(
          "invalidate_if_aborted",
          [](NcclCommunicator& self, at::Tensor result) { self.invalidate_if_aborted(result); },
          py::arg("result"), ReleaseGil())
      .def("failure", &NcclCommunicator::failure, ReleaseGil());
}

}  // namespace bagua
