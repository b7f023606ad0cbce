#include "health/diagnose.h"

#include <algorithm>
#include <optional>
#include <utility>
#include <vector>

#include "base/check.h"
#include "health/failure.h"

namespace bagua {
namespace {

// Removes the first `part` from `text`; false if it is not there.
bool remove(std::string& text, const std::string& part) {
  const size_t at = text.find(part);
  if (at == std::string::npos) return false;
  text.erase(at, part.size());
  return true;
}

}  // namespace

std::string diagnose(const std::string& seen, bool secondary, const Position& position,
                     FailureBoard& board) {
  const std::optional<FailureBoard::News> failed = board.poll();
  const std::optional<std::string> left = board.poll_left(position.needed);
  const bool known = left || (failed && !failed->is_secondary);
  if (!known && !secondary) return seen;
  std::vector<std::string> lines;
  if (failed && !failed->is_secondary) lines.push_back(failed->text);
  if (left) lines.push_back(*left);
  std::string nobody;
  if (!known) {
    OtherRanks others = board.others({.rank = -1,
                                      .round = position.number,
                                      .unit = position.unit,
                                      .everyone = position.everyone});
    nobody = others.nobody;
    lines = std::move(others.causes);
    lines.insert(lines.end(), others.failed.begin(), others.failed.end());
    // The report of a rank that failed because of another helps only where nobody is silent.
    if (lines.empty() && failed) lines.push_back(failed->text);
  }
  if (lines.empty()) return concat(seen, " ", nobody);
  const std::string peer = concat("rank ", position.peer, " ");
  std::stable_partition(lines.begin(), lines.end(),
                        [&](const std::string& line) { return line.starts_with(peer); });
  std::string here = seen;
  for (const std::string& line : lines) remove(here, line);
  std::string text = lines[0];
  for (size_t i = 1; i < lines.size(); ++i) text += "\n  " + lines[i];
  return concat(text, "\n  Seen here: ", here);
}

std::exception_ptr diagnose(const std::exception_ptr& cause, const Position& position,
                            FailureBoard& board) {
  return with_message(cause, diagnose(message_of(cause), may_be_secondary(cause), position, board));
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

}  // namespace bagua
