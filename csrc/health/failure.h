// What is done with an exception that ended a round.
#pragma once

#include <exception>
#include <string>

namespace bagua {

// The same kind of exception with more before and behind its message.
std::exception_ptr in_context(const std::string& before, const std::exception_ptr& cause,
                              const std::string& behind);
std::exception_ptr with_context(const std::string& context, const std::exception_ptr& cause);

// Whether another rank may be the cause: then the heartbeats are looked at.
bool may_be_secondary(const std::exception_ptr& failure);

std::string message_of(const std::exception_ptr& failure);

}  // namespace bagua
