#include "health/failure.h"

#include "base/check.h"
#include "health/error_text.h"

namespace bagua {

std::exception_ptr with_message(const std::exception_ptr& cause, const std::string& message) {
  try {
    std::rethrow_exception(cause);
  } catch (const TimeoutError&) {
    return std::make_exception_ptr(TimeoutError(message));
  } catch (const MismatchError&) {
    return std::make_exception_ptr(MismatchError(message));
  } catch (const TransportError&) {
    return std::make_exception_ptr(TransportError(message));
  } catch (...) {
    return std::make_exception_ptr(Error(message));
  }
}

std::exception_ptr with_context(const std::string& context, const std::exception_ptr& cause) {
  return with_message(cause, context + message_of(cause));
}

Blame blame_of(const std::exception_ptr& failure) {
  try {
    std::rethrow_exception(failure);
  } catch (const TransportError&) {
    return Blame::kMaybeOther;
  } catch (const TimeoutError&) {
    return Blame::kMaybeOther;
  } catch (...) {
    return Blame::kThisRank;
  }
}

std::string message_of(const std::exception_ptr& failure) {
  try {
    std::rethrow_exception(failure);
  } catch (const std::exception& error) {
    return short_text(error);
  } catch (...) {
    return "unknown error";
  }
}

}  // namespace bagua
