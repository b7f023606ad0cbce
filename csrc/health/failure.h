// Rebuilds exceptions with other messages.
#pragma once

#include <cstdint>
#include <exception>
#include <string>

namespace bagua {

// Rebuilds the exception, same type, with another message, or with a prefix.
std::exception_ptr with_message(const std::exception_ptr& cause, const std::string& message);
std::exception_ptr with_context(const std::string& context, const std::exception_ptr& cause);

// Tells which ranks have caused a failure.
enum class Blame : uint8_t {
  kThisRank,    // of the rank that met it
  kMaybeOther,  // maybe the consequence of another rank's: the heartbeats are looked at
  kAllRanks,    // each rank meets it by itself, a MismatchError, unless it is told before
};

// kThisRank or kMaybeOther, by the type.
Blame blame_of(const std::exception_ptr& failure);

std::string message_of(const std::exception_ptr& failure);

}  // namespace bagua
