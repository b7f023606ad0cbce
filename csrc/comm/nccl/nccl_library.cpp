#include "comm/nccl/nccl_library.h"

#include <dlfcn.h>

#include "base/check.h"
#include "comm/nccl/nccl_functions.h"

namespace bagua {
namespace {

constexpr const char* kName = "libnccl.so.2";
// Before 2.27.3 a group's job belonged to the thread that had opened it, and asking for its state
// from another was not supported; before 2.27.6 ending a communicator changed the current device.
constexpr int kOldest = NCCL_VERSION(2, 27, 6);

std::string version_text(int code) {
  return concat(code / 10000, ".", code / 100 % 100, ".", code % 100);
}

// Where the loader found it: the name alone does not say.
std::string file_of(void* function, const std::string& fallback) {
  Dl_info info{};
  return dladdr(function, &info) != 0 && info.dli_fname ? info.dli_fname : fallback;
}

class Symbols {
 public:
  Symbols(void* handle, const std::string& path) : handle_(handle), path_(path) {}

  template <typename Function>
  void find(Function& function, const char* name) const {
    find_if_there(function, name);
    BAGUA_CHECK(function, path_, " has no ", name, ": bagua needs NCCL ", version_text(kOldest),
                " or newer. Install the nvidia-nccl wheel that your torch asks for.");
  }

  template <typename Function>
  void find_if_there(Function& function, const char* name) const {
    function = reinterpret_cast<Function>(dlsym(handle_, name));
  }

 private:
  void* handle_;
  const std::string& path_;
};

std::shared_ptr<const NcclLibrary> table_of(void* handle, const std::string& path) {
  const Symbols symbols(handle, path);
  auto functions = std::make_shared<NcclFunctions>();
  // 1. The version, so that an old library is called old.
  symbols.find(functions->get_version, "ncclGetVersion");
  int version = 0;
  BAGUA_CHECK(functions->get_version(&version) == ncclSuccess && version >= kOldest, path,
              " is NCCL ", version_text(version), "; bagua needs ", version_text(kOldest),
              " or newer. Install the nvidia-nccl wheel that your torch asks for.");
  // 2. Everything else.
  symbols.find(functions->get_error_string, "ncclGetErrorString");
  symbols.find_if_there(functions->get_last_error, "ncclGetLastError");
  symbols.find(functions->get_unique_id, "ncclGetUniqueId");
  symbols.find(functions->comm_init_rank_config, "ncclCommInitRankConfig");
  symbols.find(functions->comm_split, "ncclCommSplit");
  symbols.find(functions->comm_get_async_error, "ncclCommGetAsyncError");
  symbols.find(functions->comm_finalize, "ncclCommFinalize");
  symbols.find(functions->comm_destroy, "ncclCommDestroy");
  symbols.find(functions->comm_abort, "ncclCommAbort");
  symbols.find(functions->group_start, "ncclGroupStart");
  symbols.find(functions->group_end, "ncclGroupEnd");
  symbols.find(functions->all_reduce, "ncclAllReduce");
  symbols.find(functions->all_gather, "ncclAllGather");
  symbols.find(functions->broadcast, "ncclBroadcast");
  symbols.find(functions->send, "ncclSend");
  symbols.find(functions->recv, "ncclRecv");
  const std::string file = file_of(reinterpret_cast<void*>(functions->get_version), path);
  return std::make_shared<const NcclLibrary>(
      NcclLibrary{file, version_text(version), std::move(functions)});
}

}  // namespace

bool has_nccl() { return true; }

std::shared_ptr<const NcclLibrary> find_nccl_library(const std::vector<std::string>& paths) {
  if (void* loaded = dlopen(kName, RTLD_NOW | RTLD_NOLOAD)) return table_of(loaded, kName);
  std::string tried;
  for (const std::string& path : paths) {
    if (void* handle = dlopen(path.c_str(), RTLD_NOW | RTLD_LOCAL)) return table_of(handle, path);
    tried += concat("\n  ", path, ": ", dlerror());
  }
  throw Error(concat("NCCL could not be loaded; the process has no ", kName, " and tried:", tried,
                     "\nInstall the nvidia-nccl wheel that your torch asks for, set "
                     "BAGUA_NCCL_LIBRARY to the file, or set BAGUA_COMM=c10d."));
}

std::shared_ptr<const NcclLibrary> open_nccl_library(const std::string& path) {
  void* handle = dlopen(path.c_str(), RTLD_NOW | RTLD_LOCAL);
  BAGUA_CHECK(handle, "NCCL could not be loaded: ", dlerror());
  return table_of(handle, path);
}

}  // namespace bagua
