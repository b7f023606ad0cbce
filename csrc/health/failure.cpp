#include "health/failure.h"

#include "base/check.h"
#include "health/error_text.h"

namespace bagua {

std::exception_ptr in_context(const std::string& before, const std::exception_ptr& cause,
                              const std::string& behind) {
  try {
    std::rethrow_exception(cause);
  } catch (const TimeoutError& error) {
    return std::make_exception_ptr(TimeoutError(before + error.what() + behind));
  } catch (const MismatchError& error) {
    return std::make_exception_ptr(MismatchError(before + error.what() + behind));
  } catch (const TransportError& error) {
    return std::make_exception_ptr(TransportError(before + error.what() + behind));
  } catch (const std::exception& error) {
    return std::make_exception_ptr(Error(before + short_text(error) + behind));
  } catch (...) {
    return std::make_exception_ptr(Error(before + "unknown error" + behind));
  }
}

std::exception_ptr with_context(const std::string& context, const std::exception_ptr& cause) {
  return in_context(context, cause, "");
}

bool may_be_secondary(const std::exception_ptr& failure) {
  try {
    std::rethrow_exception(failure);
  } catch (const TransportError&) {
    return true;
  } catch (const TimeoutError&) {
    return true;
  } catch (...) {
    return false;
  }
}

std::string message_of(const std::exception_ptr& failure) {
  try {
    std::rethrow_exception(failure);
  } catch (const std::exception& error) {
    return short_text(error);
  }
}

}  // namespace bagua
