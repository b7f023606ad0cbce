// In place of the CUDA codecs where the build has no CUDA.
#include "base/check.h"
#include "codec/cuda/chunk_codec_cuda.h"
#include "codec/plain_sum.h"
#include "codec/sparse_codec.h"

namespace bagua {

bool has_cuda_codecs() { return false; }

namespace {

[[noreturn]] void refuse(const std::string& what) {
  throw Error(concat(what,
                     " has no CUDA kernels in this build of bagua. Reinstall it where nvcc and a "
                     "CUDA build of torch are found (pip install . --no-build-isolation), or with "
                     "-Ccmake.define.BAGUA_CUDA=ON to hear what is missing; see docs/cuda.md."));
}

}  // namespace

std::shared_ptr<const Codec> make_cuda_codec(const std::string& name) {
  refuse(concat("codec '", name, "'"));
}

std::shared_ptr<const PlainSum> make_cuda_plain_sum() { return nullptr; }

std::shared_ptr<const SparseCodec> make_cuda_sparse_codec() {
  refuse("the codec of sparse messages");
}

}  // namespace bagua
