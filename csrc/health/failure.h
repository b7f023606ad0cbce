// Rebuilds exceptions with other messages.
#pragma once

#include <exception>
#include <string>

namespace bagua {

// Rebuilds the exception, same type, with another message, or with a prefix.
std::exception_ptr with_message(const std::exception_ptr& cause, const std::string& message);
std::exception_ptr with_context(const std::string& context, const std::exception_ptr& cause);

// Whether another rank may be the cause: then the heartbeats are looked at.
bool may_be_secondary(const std::exception_ptr& failure);

std::string message_of(const std::exception_ptr& failure);

}  // namespace bagua
