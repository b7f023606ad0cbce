// Finds kernels among those that were translated from PTX, and says at the end how many ran.
#include <cstdio>
#include <cstdlib>
#include <map>
#include <string>

#include <dlfcn.h>

#include "ptx/instructions.h"

namespace bagua {

namespace {

struct Launches {
  ptx::Translation translation;
  int64_t count = 0;
};

std::map<std::string, Launches>& launches_by_name();

void report() {
  int64_t kernels = 0, launches = 0;
  for (const auto& [name, each] : launches_by_name()) {
    kernels += each.count > 0;
    launches += each.count;
    if (each.count == 0) std::printf("never ran: %s\n", name.c_str());
  }
  std::printf("PTX: %lld of %zu kernels ran, %lld launches\n", static_cast<long long>(kernels),
              launches_by_name().size(), static_cast<long long>(launches));
}

std::map<std::string, Launches>& launches_by_name() {
  static auto* const launches = [] {
    auto* const made = new std::map<std::string, Launches>;
    for (const ptx::Translation* const* file = ptx::kTranslations; *file != nullptr; ++file) {
      for (const ptx::Translation* each = *file; each->name != nullptr; ++each) {
        (*made)[each->name] = {*each};
      }
    }
    std::atexit(report);
    return made;
  }();
  return *launches;
}

}  // namespace

emulation::Translated emulation::translation_of(const char* name, const void* kernel,
                                                size_t parameter_bytes) {
  Dl_info found{};
  const bool known = dladdr(kernel, &found) != 0 && found.dli_sname != nullptr;
  const auto at = launches_by_name().find(known ? found.dli_sname : name);
  if (at == launches_by_name().end() || at->second.translation.parameter_bytes != parameter_bytes) {
    std::fprintf(stderr, "ptx: kernel %s (%s) has no translation with %zu bytes of parameters\n",
                 name, known ? found.dli_sname : "not in the table of symbols", parameter_bytes);
    std::exit(4);
  }
  ++at->second.count;
  return at->second.translation.run;
}

}  // namespace bagua
