// Text that another process has written, made fit for an error message.
#pragma once

#include <string>
#include <string_view>

namespace bagua {

// At most a few thousand bytes of `bytes`, as UTF-8 without control characters: "?" stands for
// every byte that is not. (Python would raise UnicodeDecodeError in place of the error itself.)
std::string sanitize_untrusted(std::string_view bytes);

}  // namespace bagua
