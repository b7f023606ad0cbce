// Error types and the check macros that every folder of csrc uses.
//
// Library code never prints, exits or aborts: it throws one of these. csrc/binding maps them to
// Python exceptions of the same name.
#pragma once

#include <sstream>
#include <stdexcept>
#include <string>

namespace bagua {

// Base of everything the core throws: bagua.BaguaError, a RuntimeError.
class Error : public std::runtime_error {
  using std::runtime_error::runtime_error;
};

// A deadline passed: bagua.BaguaTimeoutError.
class TimeoutError final : public Error {
  using Error::Error;
};

// A call to other ranks failed, often as the consequence of a failure of one of them. Python's
// BaguaError.
class TransportError final : public Error {
  using Error::Error;
};

// Ranks do not agree (plan, algorithm, step, payload): bagua.BaguaMismatchError.
class MismatchError final : public Error {
  using Error::Error;
};

template <typename... Args>
std::string concat(const Args&... args) {
  std::ostringstream stream;
  (stream << ... << args);
  return stream.str();
}

}  // namespace bagua

// A condition on the state of the run. The message says what, with the values, and what to do.
#define BAGUA_CHECK(condition, ...)                                       \
  do {                                                                    \
    if (!(condition)) throw ::bagua::Error(::bagua::concat(__VA_ARGS__)); \
  } while (false)

// A condition on an argument of a public function: becomes Python's ValueError.
#define BAGUA_CHECK_ARG(condition, ...)                                          \
  do {                                                                           \
    if (!(condition)) throw std::invalid_argument(::bagua::concat(__VA_ARGS__)); \
  } while (false)
