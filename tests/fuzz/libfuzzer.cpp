// Lets clang's libFuzzer drive one target, the one that BAGUA_FUZZ_TARGET names (default: the
// first). Built where cmake/fuzz.cmake has BAGUA_LIBFUZZER=ON.
#include <cstdio>
#include <cstdlib>
#include <cstring>

#include "target.h"

namespace {

const bagua::fuzz::Target& chosen() {
  const char* wanted = std::getenv("BAGUA_FUZZ_TARGET");
  for (const auto& target : bagua::fuzz::targets()) {
    if (wanted == nullptr || std::strcmp(wanted, target.name) == 0) return target;
  }
  std::fprintf(stderr, "there is no target '%s'\n", wanted);
  std::exit(2);
}

}  // namespace

void bagua::fuzz::fail(const char* what) {
  std::fprintf(stderr, "%s\n", what);
  std::abort();
}

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  static const bagua::fuzz::Target& target = chosen();
  target.run(bagua::fuzz::Input({data, size}));
  return 0;
}
