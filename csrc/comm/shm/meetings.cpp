#include "comm/shm/meetings.h"

#include <exception>
#include <iterator>
#include <string>

#include "base/check.h"
#include "comm/tensor_checks.h"

namespace bagua {
namespace {

std::string text_of(const CallRecord& call) {
  constexpr const char* kNames[] = {"all_reduce", "all_gather", "all_to_all", "broadcast",
                                    "all_reduce in place"};
  const bool known = call.kind < std::size(kNames) && call.dtype >= 0 &&
                     call.dtype < static_cast<int32_t>(at::ScalarType::Undefined);
  if (!known) return "something that is not a call";
  const auto kind = static_cast<SharedCall>(call.kind);
  const auto dtype = static_cast<at::ScalarType>(call.dtype);
  std::string text = concat(kNames[call.kind], " of ", call.bytes / c10::elementSize(dtype), " ",
                            dtype_text(dtype));
  if (kind == SharedCall::kAllReduce || kind == SharedCall::kReduceInPlace) {
    text += concat(" (", reduce_op_text(static_cast<ReduceOp>(call.op)), ")");
  }
  if (kind == SharedCall::kReduceInPlace) text += concat(" of bucket ", call.root);
  if (kind == SharedCall::kBroadcast) text += concat(" from rank ", call.root);
  return concat(text, ", call ", call.number);
}

}  // namespace

Meetings::Meetings(const PeerWaits& waits, const SharedGroup& shared)
    : waits_(waits), shared_(shared) {}

void Meetings::describe(const CallSite& site, SharedCall call, ReduceOp op, int root) {
  ++calls_;
  calls_compared_ = false;
  mine().calls[calls_ % 2] = {.number = calls_,
                              .bytes = static_cast<uint64_t>(site.bytes),
                              .kind = static_cast<uint32_t>(call),
                              .dtype = static_cast<int32_t>(site.dtype),
                              .op = static_cast<int32_t>(op),
                              .root = root};
}

void Meetings::meet(const CallSite& site) {
  mine().meetings.store(++meetings_, std::memory_order_release);
  waits_.ring_all();
  try {
    await_others(site);
  } catch (const std::exception&) {
    mine().failed_meeting.store(meetings_);
    throw;
  }
  if (!calls_compared_) compare_calls();
}

void Meetings::await_others(const CallSite& site) {
  // A rank may be one meeting ahead.
  const auto has_come = [&](int rank) {
    const uint64_t ahead = shared_.state(rank).meetings.load(std::memory_order_acquire) - meetings_;
    BAGUA_CHECK(ahead + 1 <= 2, "rank ", rank, " counts ", ahead + meetings_,
                " meetings where this rank counts ", meetings_, ": its memory is damaged");
    return ahead <= 1;
  };
  int first_missing = 0;
  waits_.wait(
      site,
      [&] {
        while (first_missing < group().size && has_come(first_missing)) ++first_missing;
        return first_missing == group().size;
      },
      [&](int rank) { return !has_come(rank); }, [](int) { return true; });
  for (int rank = 0; rank < group().size; ++rank) {
    if (shared_.state(rank).failed_meeting.load() == meetings_) waits_.fail(site, rank, kGaveUp);
  }
}

void Meetings::compare_calls() {
  calls_compared_ = true;
  const CallRecord& own = mine().calls[calls_ % 2];
  for (int rank = 0; rank < group().size; ++rank) {
    const CallRecord theirs = shared_.state(rank).calls[calls_ % 2];
    if (theirs == own) continue;
    throw MismatchError(concat("ranks disagree: rank ", group().rank, " of ", group().size,
                               " called ", text_of(own), ", rank ", rank, " called ",
                               text_of(theirs)));
  }
}

}  // namespace bagua
