#include "health/straggler_watch.h"

#include <cstdio>
#include <utility>

#include "base/check.h"

namespace bagua {

StragglerWatch::StragglerWatch(const StragglerReports& reports, std::shared_ptr<FailureBoard> board,
                               std::chrono::milliseconds timeout, const char* what)
    : reports_(reports),
      board_(std::move(board)),
      timeout_(timeout),
      what_(what),
      start_(reports.clock->now()),
      next_(reports.after) {}

std::string StragglerWatch::seconds() const {
  char text[32];
  const std::chrono::duration<double> waited = reports_.clock->now() - start_;
  std::snprintf(text, sizeof text, "%.1f s", waited.count());
  return text;
}

// 1. A first look once the time is up. 2. A second one more than a heartbeat later, and the report.
// 3. The same when twice the time is up.
void StragglerWatch::look(const std::string& me, int64_t round) {
  if (next_.count() == 0 || !board_ || !reports_.report) return;
  const std::chrono::milliseconds now = reports_.clock->now();
  if (now - start_ < next_) return;
  if (!before_) {
    before_ = board_->look();
    looked_ = now;
    if (before_) return;
  } else if (now - looked_ < kBetweenLooks) {
    return;
  }
  const auto after = before_ ? board_->look() : nullptr;
  reports_.report(concat(me, ": has waited ", seconds(), " for ", what_, ". ",
                         in_words(board_->compare(before_, after, {.number = round})),
                         " It goes on waiting until ", timeout_.count() / 1000, " s have passed."));
  reported_ = true;
  before_ = nullptr;
  next_ *= 2;
}

void StragglerWatch::over(const std::string& me) const {
  reports_.report(concat(me, ": ", what_, " came after ", seconds(), "."));
}

}  // namespace bagua
