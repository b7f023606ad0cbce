#include "engine/job_agreement.h"

#include <algorithm>
#include <array>
#include <cstring>

#include "base/check.h"
#include "base/mixed_bits.h"
#include "engine/all_records.h"
#include "health/sanitize.h"

namespace bagua {
namespace {

constexpr size_t kMostJobs = 13;
constexpr size_t kTextBytes = 400;

struct JobsRecord {
  uint64_t incarnation;
  uint64_t first;
  uint16_t count;
  uint16_t says_samples;  // RankSamples::said
  float samples;          // RankSamples::number
  std::array<uint64_t, kMostJobs> jobs;
};
static_assert(sizeof(JobsRecord) == 128);

using Text = std::array<char, kTextBytes>;

// Describes the first job of each rank; every rank calls it.
[[noreturn]] void throw_difference(Communicator& communicator, const QueuedJobs& mine) {
  Text text{};
  mine.first_text.copy(text.data(), text.size() - 1);
  std::vector<std::string> texts;
  for (const Text& one : all_records<Text>(communicator, {&text, 1})) {
    const char* const end = std::find(one.data(), one.data() + one.size(), '\0');
    texts.push_back(sanitize_untrusted(std::string_view(one.data(), end - one.data())));
  }
  size_t other = 1;
  while (other + 1 < texts.size() && texts[other] == texts[0]) ++other;
  throw MismatchError(concat("job ", mine.first, " was not started: ranks differ in it. Rank 0: ",
                             texts[0], "; rank ", other, ": ", texts[other],
                             ". Every rank must make the same calls in the same order, with the "
                             "same model and arguments."));
}

}  // namespace

uint64_t text_hash(const std::string& text) {
  uint64_t hash = text.size();
  for (const char c : text) hash = mixed_bits(hash ^ static_cast<unsigned char>(c)) + 1;
  return hash;
}

AgreedJobs agree_on_jobs(Communicator& communicator, const QueuedJobs& mine) {
  if (communicator.group().size == 1) return {.count = mine.jobs.size(), .weighing = {}};
  JobsRecord record{.incarnation = mine.incarnation,
                    .first = mine.first,
                    .count = static_cast<uint16_t>(std::min(mine.jobs.size(), kMostJobs)),
                    .says_samples = mine.samples.said,
                    .samples = mine.samples.number,
                    .jobs = {}};
  std::copy_n(mine.jobs.begin(), record.count, record.jobs.begin());
  const std::vector<JobsRecord> all = all_records<JobsRecord>(communicator, {&record, 1});
  size_t count = kMostJobs;
  std::vector<RankSamples> samples;
  for (size_t rank = 0; rank < all.size(); ++rank) {
    BAGUA_CHECK(all[rank].count >= 1 && all[rank].count <= kMostJobs, "rank ", rank,
                " sent a damaged record of its jobs.");
    if (all[rank].incarnation != all[0].incarnation || all[rank].first != all[0].first) {
      throw MismatchError(concat("job ", mine.first, " was not started: rank ", rank, " is at job ",
                                 all[rank].first, " of incarnation ", all[rank].incarnation,
                                 ", rank 0 at job ", all[0].first, " of ", all[0].incarnation,
                                 ". A rank of an earlier run takes part; restart all ranks."));
    }
    count = std::min<size_t>(count, all[rank].count);
    samples.push_back({.number = all[rank].samples, .said = all[rank].says_samples != 0});
  }
  size_t equal = 0;
  while (equal < count &&
         std::all_of(
             all.begin(), all.end(),
             [&](const JobsRecord& one) { return one.jobs[equal] == all[0].jobs[equal]; })) {
    ++equal;
  }
  if (equal == 0) throw_difference(communicator, mine);
  return {.count = equal, .weighing = weighing_of(samples)};
}

}  // namespace bagua
