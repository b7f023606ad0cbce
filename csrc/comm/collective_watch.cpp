#include "comm/collective_watch.h"

#include <memory>
#include <optional>
#include <string_view>

#include <ATen/record_function.h>
#include <torch/csrc/distributed/c10d/ProcessGroup.hpp>

namespace bagua {
namespace {

constexpr std::size_t kMostCalls = 16;
constexpr std::string_view kOperators = "c10d::";

struct Watch {
  std::optional<at::CallbackHandle> callback;
  std::vector<CollectiveCall> calls;
};

Watch& watch() {
  thread_local Watch watch;
  return watch;
}

std::string group_of(const at::RecordFunction& function) try {
  const auto wanted = c10::getCustomClassType<c10::intrusive_ptr<c10d::ProcessGroup>>();
  for (const auto& input : function.inputs()) {
    if (input.isObject() && *input.type() == *wanted) {
      return input.toCustomClass<c10d::ProcessGroup>()->getGroupName();
    }
  }
  return "";
} catch (const c10::Error&) {  // arguments of some operators, as of alltoall_base_, cannot be noted
  return "";
}

std::unique_ptr<at::ObserverContext> note(const at::RecordFunction& function) {
  const std::string_view name = function.name();
  auto& calls = watch().calls;
  if (name.starts_with(kOperators) && name.find("barrier") == name.npos &&
      name != "c10d::check_for_nan" && calls.size() < kMostCalls) {
    calls.emplace_back(name.substr(kOperators.size()), group_of(function));
  }
  return nullptr;
}

}  // namespace

void watch_collectives() {
  watched_collectives();
  watch().callback = at::addThreadLocalCallback(
      at::RecordFunctionCallback(note).scopes({at::RecordScope::FUNCTION}).needsInputs(true));
}

std::vector<CollectiveCall> watched_collectives() {
  if (watch().callback) {
    at::removeCallback(*watch().callback);
    watch().callback.reset();
  }
  return std::exchange(watch().calls, {});
}

}  // namespace bagua
