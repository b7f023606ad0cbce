// Message of an exception.
#pragma once

#include <exception>
#include <string>

#include <c10/util/Exception.h>

namespace bagua {

// c10::Error's what() carries a C++ backtrace of many lines.
inline std::string short_text(const std::exception& error) {
  const auto* from_torch = dynamic_cast<const c10::Error*>(&error);
  return from_torch ? from_torch->what_without_backtrace() : error.what();
}

}  // namespace bagua
