#include "engine/straggler_watch.h"

#include <cstdio>

#include "base/check.h"

namespace bagua {

StragglerWatch::StragglerWatch(const EngineOptions& options, const char* what)
    : options_(options), what_(what), next_(options.straggler_after) {}

std::string StragglerWatch::seconds() const {
  char text[32];
  const std::chrono::duration<double> waited = Clock::now() - start_;
  std::snprintf(text, sizeof text, "%.1f s", waited.count());
  return text;
}

// 1. A first look once the time is up. 2. A second one more than a heartbeat later, and the report.
// 3. The same when twice the time is up.
void StragglerWatch::look(const std::string& me, int64_t round) {
  if (next_.count() == 0 || !options_.board || !options_.on_straggler) return;
  const Clock::time_point now = Clock::now();
  if (now - start_ < next_) return;
  if (!before_) {
    before_ = options_.board->look();
    looked_ = now;
    if (before_) return;
  } else if (now - looked_ < kBetweenLooks) {
    return;
  }
  const auto after = before_ ? options_.board->look() : nullptr;
  options_.on_straggler(concat(me, ": has waited ", seconds(), " for ", what_, ". ",
                               options_.board->compare(before_, after, round),
                               " It goes on waiting until ", options_.timeout.count() / 1000,
                               " s have passed."));
  reported_ = true;
  before_ = nullptr;
  next_ *= 2;
}

void StragglerWatch::over(const std::string& me) const {
  options_.on_straggler(concat(me, ": ", what_, " came after ", seconds(), "."));
}

}  // namespace bagua
