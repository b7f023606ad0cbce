// Sanitizes texts of other processes and of transports for error messages.
#pragma once

#include <string>
#include <string_view>

namespace bagua {

// At most a few thousand bytes of `bytes`, as UTF-8 without control characters: "?" stands for
// every byte that is not. (Python would raise UnicodeDecodeError in place of the error itself.)
std::string sanitize_untrusted(std::string_view bytes);

// The reason in a transport's message, without its source files, advice and ornaments.
std::string reason_of_transport(const std::string& text);

// Whether a transport's message says that a deadline passed. gloo's time-outs have no type of their
// own: C++ sees gloo::IoException, whose header torch does not install, and Python RuntimeError. A
// store's are c10::DistStoreError like its other errors.
bool is_timeout_of_transport(std::string text);

}  // namespace bagua
