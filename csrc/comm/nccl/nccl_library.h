// The NCCL of the process, found at run time: a build needs nccl.h, an import needs nothing.
#pragma once

#include <memory>
#include <string>
#include <vector>

namespace bagua {

struct NcclFunctions;

// A loaded libnccl. Immutable, shared by its communicators, and never unloaded: NCCL has threads.
struct NcclLibrary {
  std::string path;     // the file it came from
  std::string version;  // "2.28.9"
  std::shared_ptr<const NcclFunctions> functions;
};

// Whether this build can talk to NCCL.
bool has_nccl();

// The library that the process has loaded already (torch's), else the first of `paths` that loads.
// Throws Error: none did (naming what was tried), a function is missing, or NCCL is too old.
std::shared_ptr<const NcclLibrary> find_nccl_library(const std::vector<std::string>& paths);

// Exactly the library at `path`, whatever the process has loaded: for tests. Throws as above.
std::shared_ptr<const NcclLibrary> open_nccl_library(const std::string& path);

}  // namespace bagua
