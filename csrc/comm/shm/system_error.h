// Errors of system calls.
#pragma once

#include <cerrno>
#include <string>
#include <system_error>

#include "base/check.h"

namespace bagua {

// "memfd_create: Too many open files"
inline std::string system_error_text(const char* call) {
  return concat(call, ": ", std::generic_category().message(errno));
}

}  // namespace bagua

// The result of a system call, which sets errno where this is false.
#define BAGUA_CHECK_SYSTEM(condition, call) BAGUA_CHECK(condition, ::bagua::system_error_text(call))
