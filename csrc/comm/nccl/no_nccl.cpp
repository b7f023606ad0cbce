// Stands in for nccl_*.cpp in a build without nccl.h.
#include "base/check.h"
#include "comm/nccl/nccl_communicator.h"
#include "comm/nccl/nccl_library.h"

namespace bagua {
namespace {

[[noreturn]] void refuse() {
  throw Error(
      "this build of bagua has no NCCL: when it was built, the environment had no nccl.h. Install "
      "the nvidia-nccl wheel that your torch asks for, then: pip install . --no-build-isolation "
      "(BAGUA_NCCL=ON makes the build stop where it is missing); or set BAGUA_COMM=c10d.");
}

}  // namespace

bool has_nccl() { return false; }

std::shared_ptr<const NcclLibrary> find_nccl_library(const std::vector<std::string>&) { refuse(); }

std::shared_ptr<const NcclLibrary> open_nccl_library(const std::string&) { refuse(); }

std::shared_ptr<NcclCommunicator> make_nccl_communicator(const NcclOptions&) { refuse(); }

}  // namespace bagua
