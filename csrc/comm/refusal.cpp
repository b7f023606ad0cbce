#include "comm/refusal.h"

#include "base/check.h"

namespace bagua {

void Refusal::check(const char* call) const {
  if (!is_set()) return;
  throw Error(
      concat("rank ", group_.rank, " of ", group_.size, ": ", call, " refused: ", reason()));
}

void Refusal::refuse(const std::string& reason) noexcept {
  const std::lock_guard lock(mutex_);
  if (!is_set()) reason_ = reason;
  refuses_.store(true, std::memory_order_release);
}

std::string Refusal::reason() const {
  const std::lock_guard lock(mutex_);
  return reason_;
}

std::string Refusal::failure_text(const CallSite& site, const std::string& what) const {
  return concat("rank ", group_.rank, " of ", group_.size, ": ", site.text(), " failed: ", what);
}

}  // namespace bagua
