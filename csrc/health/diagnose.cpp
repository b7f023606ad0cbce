#include "health/diagnose.h"

#include <algorithm>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "base/check.h"
#include "health/failure.h"

namespace bagua {
namespace {

// Removes the first `part` from `text`, if it is there, and the colon that announced it at the end.
void remove(std::string& text, const std::string& part) {
  const size_t at = text.find(part);
  if (at == std::string::npos) return;
  text.erase(at, part.size());
  if (text.ends_with(": ")) text.resize(text.size() - 2);
}

std::string joined(std::string text, const std::vector<std::string>& lines) {
  for (const std::string& line : lines) text += "\n  " + line;
  return text;
}

// `failed`: the first failure on the board.
std::string diagnosis(const std::string& seen, Blame blame,
                      const std::optional<FailureBoard::News>& failed, const Position& position,
                      FailureBoard& board) {
  const std::optional<std::string> exited = board.poll_exit(position.needed);
  const bool explains = failed && failed->blame != Blame::kMaybeOther;
  const bool known = exited || explains;
  if (!known && blame != Blame::kMaybeOther) return seen;
  std::vector<std::string> lines;
  if (explains) lines.push_back(failed->text);
  if (exited) lines.push_back(*exited);
  std::string nobody;
  if (!known) {
    OtherRanks others = board.others(position);
    nobody = others.nobody;
    lines = std::move(others.causes);
    // The peer that a rank waited for may have waited for the store's process.
    if (others.store_is_silent) lines.insert(lines.begin(), std::exchange(nobody, ""));
    const bool nobody_to_blame = lines.empty() || others.store_is_silent;
    // The report of a rank that failed because of another helps only if no rank is silent.
    if (nobody_to_blame && failed) lines.push_back(failed->text);
    for (const auto* list : {&others.failed, &others.present}) {
      lines.insert(lines.end(), list->begin(), list->end());
    }
    // All have failed, maybe alike: what this rank saw says more than that others failed too.
    if (nobody_to_blame && !others.store_is_silent && !lines.empty()) {
      std::erase_if(lines,
                    [&](const std::string& line) { return seen.find(line) != std::string::npos; });
      return joined(seen, lines);
    }
  }
  if (lines.empty()) return concat(seen, " ", nobody);
  const std::string peer = concat("rank ", position.peer, " ");
  std::stable_partition(lines.begin(), lines.end(),
                        [&](const std::string& line) { return line.starts_with(peer); });
  std::string here = seen;
  for (const std::string& line : lines) remove(here, line);
  return concat(joined(lines[0], {lines.begin() + 1, lines.end()}), "\n  Seen here: ", here);
}

}  // namespace

std::exception_ptr diagnose(const std::exception_ptr& cause, const Position& position,
                            FailureBoard& board) {
  const std::optional<FailureBoard::News> failed = board.poll();
  const std::string text = diagnosis(message_of(cause), blame_of(cause), failed, position, board);
  if (failed && failed->blame == Blame::kAllRanks) {
    return std::make_exception_ptr(MismatchError(text));
  }
  return with_message(cause, text);
}

}  // namespace bagua
