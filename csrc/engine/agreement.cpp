#include "engine/agreement.h"

#include <algorithm>
#include <array>
#include <ios>

#include "base/check.h"
#include "engine/all_records.h"

namespace bagua {
namespace {

struct Field {
  uint64_t AgreementRecord::* value;
  const char* what;
  const char* remedy;
};

constexpr std::array<Field, 4> kFields{{
    {&AgreementRecord::incarnation, "incarnation of the run",
     "a rank of an earlier run or of an earlier with_bagua takes part; restart all ranks"},
    {&AgreementRecord::fingerprint, "bucket plan",
     "ranks run another model, algorithm, codec or bucket size; make them equal and restart"},
    {&AgreementRecord::round, "number of synchronising steps",
     "a rank skipped or repeated a backward; every rank must make the same number of them"},
    {&AgreementRecord::frozen, "parameters that were frozen since the wrap",
     "ranks froze or unfroze different parameters: requires_grad must change on all ranks between "
     "the same two steps"},
}};

}  // namespace

bool agree(Communicator& communicator, const AgreementRecord& mine) {
  const int size = communicator.group().size;
  if (size == 1) return true;
  const std::vector<AgreementRecord> all = all_records(communicator, mine);
  for (const Field& field : kFields) {
    bool equal = true;
    std::string values;
    for (int rank = 0; rank < size; ++rank) {
      equal = equal && all[rank].*field.value == all[0].*field.value;
      values += concat(rank ? ", rank " : "rank ", rank, ": ", std::hex, all[rank].*field.value);
    }
    if (equal) continue;
    throw MismatchError(concat("round ", mine.round, " was not started: ranks differ in the ",
                               field.what, " (", values, "). ", field.remedy, "."));
  }
  const auto all_of = [&](auto holds) { return std::all_of(all.begin(), all.end(), holds); };
  const AgreementRecord& first = all[0];
  return !all_of([](const AgreementRecord& r) { return (r.flags & kShowsWeights) != 0; }) ||
         all_of([&](const AgreementRecord& r) { return r.weights == first.weights; }) ||
         all_of([&](const AgreementRecord& r) { return r.weights_before == first.weights_before; });
}

}  // namespace bagua
