#include "engine/agreement.h"

#include <algorithm>
#include <array>
#include <ios>

#include "base/check.h"
#include "engine/all_records.h"

namespace bagua {
namespace {

struct Field {
  uint64_t (*value)(const AgreementRecord& record);
  const char* what;
  const char* remedy;
};

constexpr std::array<Field, 5> kFields{{
    {[](const AgreementRecord& r) { return r.incarnation; }, "incarnation of the run",
     "a rank of an earlier run or of an earlier bagua.wrap takes part; restart all ranks"},
    {[](const AgreementRecord& r) { return r.fingerprint; }, "bucket plan",
     "ranks run another model, algorithm, codec or bucket size; make them equal and restart"},
    {[](const AgreementRecord& r) { return r.round; }, "number of synchronising steps",
     "a rank skipped or repeated a backward; every rank must make the same number of them"},
    {[](const AgreementRecord& r) { return uint64_t{r.part}; }, "fragment that they average",
     "a rank made more or fewer optimizer steps than the others, or calls sync() alone"},
    {[](const AgreementRecord& r) { return r.frozen; },
     "parameters that were frozen since the wrap",
     "ranks froze or unfroze different parameters: requires_grad must change on all ranks between "
     "the same two steps"},
}};

}  // namespace

Agreement agree(Communicator& communicator, const AgreementRecord& mine) {
  const int size = communicator.group().size;
  if (size == 1) return {.equal_weights = true, .weighing = {}, .samples_later = false};
  const std::vector<AgreementRecord> all = all_records<AgreementRecord>(communicator, {&mine, 1});
  for (const Field& field : kFields) {
    bool equal = true;
    std::string values;
    for (int rank = 0; rank < size; ++rank) {
      const uint64_t value = field.value(all[rank]);
      equal = equal && value == field.value(all[0]);
      values += concat(rank ? ", rank " : "rank ", rank, ": ", std::hex, value);
    }
    if (equal) continue;
    throw MismatchError(concat("round ", mine.round, " was not started: ranks differ in the ",
                               field.what, " (", values, "). ", field.remedy, "."));
  }
  const auto all_of = [&](auto holds) { return std::all_of(all.begin(), all.end(), holds); };
  const AgreementRecord& first = all[0];
  const bool equal =
      !all_of([](const AgreementRecord& r) { return (r.flags & kShowsWeights) != 0; }) ||
      all_of([&](const AgreementRecord& r) { return r.weights == first.weights; }) ||
      all_of([&](const AgreementRecord& r) { return r.weights_before == first.weights_before; });
  std::vector<RankSamples> samples;
  bool later = false;
  for (const AgreementRecord& r : all) {
    samples.push_back({.number = r.samples, .said = (r.flags & kSaysSamples) != 0});
    later = later || (r.flags & kSamplesLater) != 0;
  }
  const Weighing weighing = weighing_of(samples);
  return {
      .equal_weights = equal, .weighing = weighing, .samples_later = later && weighing.by_samples};
}

}  // namespace bagua
