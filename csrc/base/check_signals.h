// The look at signals of a wait that may be the main thread's.
#pragma once

#include <chrono>
#include <functional>

namespace bagua {

// Called between the slices of a wait, without locks. What it throws ends the wait.
using CheckSignals = std::function<void()>;

inline constexpr std::chrono::milliseconds kBetweenSignals(100);

}  // namespace bagua
