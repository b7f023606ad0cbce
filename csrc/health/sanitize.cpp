#include "health/sanitize.h"

#include <algorithm>
#include <cctype>
#include <cstddef>
#include <cstdint>

namespace bagua {
namespace {

constexpr size_t kMostBytes = 4096;
constexpr std::string_view kCut = " ...";

// Bytes of the UTF-8 character at the front of `bytes`, which is not empty; 0: there is none.
size_t character_bytes(std::string_view bytes) {
  const auto first = static_cast<uint8_t>(bytes.front());
  if (first < 0x80) return first == '\n' || (first >= 0x20 && first != 0x7f) ? 1 : 0;
  const size_t length = first >= 0xf0 ? 4 : first >= 0xe0 ? 3 : 2;
  if (first < 0xc2 || first > 0xf4 || bytes.size() < length) return 0;
  uint32_t code = first & (0x7f >> length);
  for (const char each : bytes.substr(1, length - 1)) {
    const auto byte = static_cast<uint8_t>(each);
    if (byte >> 6 != 2) return 0;
    code = code << 6 | (byte & 0x3f);
  }
  constexpr uint32_t kSmallest[] = {0, 0, 0x80, 0x800, 0x10000};
  const bool surrogate = code >= 0xd800 && code < 0xe000;
  return code < kSmallest[length] || code > 0x10ffff || surrogate ? 0 : length;
}

}  // namespace

std::string sanitize_untrusted(std::string_view bytes) {
  const auto plain = [](char byte) { return byte >= 0x20 && byte < 0x7f; };
  if (bytes.size() <= kMostBytes && std::all_of(bytes.begin(), bytes.end(), plain)) {
    return std::string(bytes);
  }
  std::string text;
  while (!bytes.empty()) {
    const size_t length = character_bytes(bytes);
    if (text.size() + std::max<size_t>(length, 1) > kMostBytes) return text.append(kCut);
    text += length == 0 ? std::string_view("?") : bytes.substr(0, length);
    bytes.remove_prefix(std::max<size_t>(length, 1));
  }
  return text;
}

// 1. Source files of gloo: "[/path/pair.cc:547] ". 2. c10d's advice and what follows it.
std::string reason_of_transport(const std::string& text) {
  std::string reason = text;
  for (size_t begin = reason.find("[/"); begin != std::string::npos; begin = reason.find("[/")) {
    const size_t end = reason.find("] ", begin);
    if (end == std::string::npos) break;
    reason.erase(begin, end + 2 - begin);
  }
  for (const char* advice :
       {"This is typically caused by", "Check the logs of the remote worker"}) {
    reason = reason.substr(0, reason.find(advice));
  }
  while (!reason.empty() && (reason.back() == ' ' || reason.back() == '.')) reason.pop_back();
  return reason.empty() ? text : reason;
}

bool is_timeout_of_transport(std::string text) {
  std::transform(text.begin(), text.end(), text.begin(),
                 [](unsigned char letter) { return std::tolower(letter); });
  return text.find("timed out") != std::string::npos || text.find("timeout") != std::string::npos;
}

}  // namespace bagua
