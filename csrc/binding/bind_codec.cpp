// Python's view of the codecs: tensors in, tensors out, for tests, benchmarks and users' own ops.
// Everything is checked here, once; the codecs trust their callers.
#include <memory>
#include <string>
#include <vector>

#include <ATen/core/Tensor.h>
#include <ATen/ops/empty.h>
#include <c10/core/DeviceGuard.h>
#include <torch/csrc/utils/pybind.h>

#include "base/check.h"
#include "base/per_instruction_set.h"
#include "binding/bindings.h"
#include "codec/cuda/chunk_codec_cuda.h"
#include "codec/factory.h"
#include "comm/device_stream.h"

namespace py = pybind11;

namespace bagua {

namespace {

DType codec_dtype(at::ScalarType dtype) {
  BAGUA_CHECK_ARG(dtype == at::kFloat || dtype == at::kHalf || dtype == at::kBFloat16,
                  "a codec reads and writes float32, float16 and bfloat16, got ",
                  at::toString(dtype), "; cast the tensor first");
  if (dtype == at::kFloat) return DType::kFloat32;
  return dtype == at::kHalf ? DType::kFloat16 : DType::kBFloat16;
}

Processor processor_of(c10::DeviceType type) {
  BAGUA_CHECK_ARG(type == c10::kCPU || type == c10::kCUDA, "codecs are for cpu and cuda, not '",
                  c10::DeviceTypeName(type, /*lower_case=*/true), "'");
  return type == c10::kCPU ? Processor::kCpu : Processor::kCuda;
}

const char* processor_name(const Codec& codec) {
  return codec.processor() == Processor::kCpu ? "CPU" : "CUDA";
}

void check_dense(const Codec& codec, const at::Tensor& tensor, const char* name) {
  BAGUA_CHECK_ARG(tensor.device().is_cpu() == (codec.processor() == Processor::kCpu), name,
                  " must be a ", processor_name(codec), " tensor, it is on ",
                  tensor.device().str());
  BAGUA_CHECK_ARG(tensor.layout() == at::kStrided && tensor.is_contiguous(), name,
                  " must be a dense contiguous tensor; call .contiguous() first");
}

// The size of each of `chunks` equal parts of x.
int64_t chunk_numel_of(const at::Tensor& x, int64_t chunks) {
  BAGUA_CHECK_ARG(chunks >= 1, "chunks must be at least 1, got ", chunks);
  BAGUA_CHECK_ARG(x.numel() % chunks == 0, "a tensor of ", x.numel(),
                  " elements cannot be split into ", chunks, " equal chunks; pad it first");
  return x.numel() / chunks;
}

void check_payload(const Codec& codec, const at::Tensor& payload, DType dtype, int64_t chunk_numel,
                   int64_t chunks) {
  check_dense(codec, payload, "payload");
  BAGUA_CHECK_ARG(payload.scalar_type() == at::kByte, "payload must be uint8, it is ",
                  at::toString(payload.scalar_type()));
  const int64_t wanted = chunks * codec.payload_bytes(dtype, chunk_numel);
  BAGUA_CHECK_ARG(payload.numel() == wanted, "the payload of ", chunks, " chunks of ", chunk_numel,
                  " elements of ", dtype_name(dtype), " under ", codec.name(), " has ", wanted,
                  " bytes, got ", payload.numel());
  BAGUA_CHECK_ARG(reinterpret_cast<uintptr_t>(payload.const_data_ptr()) % sizeof(float) == 0,
                  "payload must start at a multiple of ", sizeof(float), " bytes");
}

// `chunks` equal parts of x, which has `chunk_numel` elements in each.
std::vector<Chunk> chunks_of(const Codec& codec, const at::Tensor& x, DType dtype,
                             const at::Tensor& payload, int64_t chunks) {
  const int64_t numel = x.numel() / chunks;
  const int64_t stride = codec.payload_bytes(dtype, numel);
  auto* first = static_cast<std::byte*>(x.data_ptr());
  auto* bytes = static_cast<std::byte*>(payload.data_ptr());
  std::vector<Chunk> result;
  for (int64_t i = 0; i < chunks; ++i) {
    const auto offset = i * numel * static_cast<int64_t>(x.element_size());
    result.push_back({first + offset, bytes + i * stride, numel});
  }
  return result;
}

// Calls encode(chunks, dtype, scratch, stream) for equal parts of x.
template <typename Encode>
void encode_with(const Codec& codec, const at::Tensor& x, int64_t chunks, const at::Tensor& payload,
                 Encode encode) {
  // Checks
  check_dense(codec, x, "x");
  const DType dtype = codec_dtype(x.scalar_type());
  check_payload(codec, payload, dtype, chunk_numel_of(x, chunks), chunks);

  const py::gil_scoped_release no_gil;
  const c10::DeviceGuard on_device(x.device());
  const std::vector<Chunk> all = chunks_of(codec, x, dtype, payload, chunks);
  // Freed at the end, for later work of the same stream.
  const at::Tensor scratch = at::empty({codec.scratch_bytes(all, dtype)}, payload.options());
  encode(all, dtype, static_cast<std::byte*>(scratch.data_ptr()),
         current_stream_handle(x.device()));
}

void encode_into(const Codec& codec, const at::Tensor& x, int64_t chunks,
                 const at::Tensor& payload) {
  encode_with(codec, x, chunks, payload,
              [&](const auto&... arguments) { codec.encode(arguments...); });
}

void encode_residual(const Codec& codec, const at::Tensor& x, int64_t chunks,
                     const at::Tensor& payload) {
  BAGUA_CHECK_ARG(x.scalar_type() == at::kFloat, "x must be float32, it is ",
                  at::toString(x.scalar_type()));
  encode_with(codec, x, chunks, payload,
              [&](const auto& all, DType, std::byte* scratch, StreamHandle stream) {
                codec.encode_residual(all, scratch, stream);
              });
}

void decode_into(const Codec& codec, const at::Tensor& payload, int64_t chunks,
                 const at::Tensor& x) {
  // Checks
  check_dense(codec, x, "x");
  const DType dtype = codec_dtype(x.scalar_type());
  check_payload(codec, payload, dtype, chunk_numel_of(x, chunks), chunks);

  const py::gil_scoped_release no_gil;
  const c10::DeviceGuard on_device(x.device());
  codec.decode(chunks_of(codec, x, dtype, payload, chunks), dtype,
               current_stream_handle(x.device()));
}

at::Tensor encode(const Codec& codec, const at::Tensor& x, int64_t chunks) {
  const int64_t chunk_numel = chunk_numel_of(x, chunks);
  const int64_t bytes = chunks * codec.payload_bytes(codec_dtype(x.scalar_type()), chunk_numel);
  const at::Tensor payload = at::empty({bytes}, x.options().dtype(at::kByte));
  encode_into(codec, x, chunks, payload);
  return payload;
}

at::Tensor decode(const Codec& codec, const at::Tensor& payload, int64_t chunks,
                  at::ScalarType dtype, int64_t chunk_numel) {
  BAGUA_CHECK_ARG(chunks >= 1, "chunks must be at least 1, got ", chunks);
  BAGUA_CHECK_ARG(chunk_numel >= 0, "chunk_numel must not be negative, got ", chunk_numel);
  check_payload(codec, payload, codec_dtype(dtype), chunk_numel, chunks);
  const at::Tensor x = at::empty({chunks * chunk_numel}, payload.options().dtype(dtype));
  decode_into(codec, payload, chunks, x);
  return x;
}

void decode_add(const Codec& codec, const at::Tensor& payload, at::ScalarType scalar_type,
                const at::Tensor& sum, float weight) {
  // Checks
  check_dense(codec, sum, "sum");
  BAGUA_CHECK_ARG(sum.scalar_type() == at::kFloat, "sum must be float32, it is ",
                  at::toString(sum.scalar_type()));
  const DType dtype = codec_dtype(scalar_type);
  check_payload(codec, payload, dtype, sum.numel(), 1);

  const py::gil_scoped_release no_gil;
  const c10::DeviceGuard on_device(sum.device());
  const Chunk chunk{sum.data_ptr(), static_cast<std::byte*>(payload.data_ptr()), sum.numel()};
  codec.decode_add({&chunk, 1}, dtype, weight, current_stream_handle(sum.device()));
}

int64_t payload_bytes(const Codec& codec, at::ScalarType dtype, int64_t chunk_numel) {
  BAGUA_CHECK_ARG(chunk_numel >= 0, "chunk_numel must not be negative, got ", chunk_numel);
  return codec.payload_bytes(codec_dtype(dtype), chunk_numel);
}

void define_methods(py::class_<Codec, std::shared_ptr<Codec>>& codec) {
  codec.def_property_readonly("name", &Codec::name)
      .def_property_readonly("block_numel", &Codec::block_numel)
      .def("payload_bytes", &payload_bytes, py::arg("dtype"), py::arg("chunk_numel"),
           "Bytes of the payload of one chunk of `chunk_numel` elements; a multiple of 32.")
      .def("encode", &encode, py::arg("x"), py::arg("chunks") = 1,
           "The payloads, side by side, of `chunks` equal consecutive parts of x.\n\n"
           "x: contiguous float32, float16 or bfloat16 of any shape. Returns uint8 of shape\n"
           "(chunks * payload_bytes,).")
      .def("decode", &decode, py::arg("payload"), py::arg("chunks"), py::arg("dtype"),
           py::arg("chunk_numel"),
           "The values of `chunks` payloads: a tensor of `dtype` and shape\n"
           "(chunks * chunk_numel,). dtype and chunk_numel must be those that were encoded.")
      .def("decode_add", &decode_add, py::arg("payload"), py::arg("dtype"), py::arg("sum"),
           py::arg("weight") = 1.0f,
           "Adds weight * decoded to `sum` in place, for the payload of one chunk of sum.numel()\n"
           "elements that was encoded from `dtype`. sum: contiguous float32.")
      .def("encode_into", &encode_into, py::arg("x"), py::arg("chunks"), py::arg("payload"),
           "encode into an existing uint8 tensor.")
      .def("encode_residual", &encode_residual, py::arg("x"), py::arg("chunks"), py::arg("payload"),
           "encode_into, after which x, contiguous float32, is what the payload has lost:\n"
           "x - decoded.")
      .def("decode_into", &decode_into, py::arg("payload"), py::arg("chunks"), py::arg("x"),
           "decode into an existing tensor, which gives dtype and size.")
      .def("__repr__", [](const Codec& self) { return "Codec('" + self.name() + "')"; });
}

}  // namespace

void bind_codec(py::module_& m) {
  // pybind11 has no pointers to const; a codec has no state that Python could change.
  py::class_<Codec, std::shared_ptr<Codec>> codec(
      m, "Codec",
      "Turns chunks of numbers into payloads of fewer bytes and back, on tensors of its device: "
      "on\n"
      "CUDA, ordered on the current stream.\n\n"
      "Stateless: may be shared between threads. Layouts: docs/wire-format.md. Every method "
      "raises\n"
      "ValueError for a wrong dtype, size, device or memory layout.");
  define_methods(codec);
  m.def(
      "make_codec",
      [](const std::string& name, const std::string& device) {
        const c10::Device on(device);
        const Processor processor = processor_of(on.type());
        c10::OptionalDeviceGuard guard;
        if (on.is_cuda() && on.has_index() && has_cuda_codecs()) guard.reset_device(on);
        return std::const_pointer_cast<Codec>(make_codec(name, processor));
      },
      py::arg("name"), py::arg("device") = "cpu",
      "The codec called `name`, for tensors of `device` ('cpu', 'cuda' or 'cuda:1'), whose "
      "kernels\n"
      "are loaded there, or on the current device. ValueError, with the names there are, if none\n"
      "is; BaguaError if this build has no CUDA kernels.");
  m.def("has_cuda_codecs", &has_cuda_codecs);
  m.def("instruction_set", &instruction_set);
  m.def("codec_names", &codec_names);
}

}  // namespace bagua
