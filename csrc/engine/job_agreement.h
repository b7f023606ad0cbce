// The 128 bytes that every rank sends to every other before jobs of a dynamic lane are run.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "comm/communicator.h"
#include "engine/rank_samples.h"

namespace bagua {

// Hash of a text, equal on all machines.
uint64_t text_hash(const std::string& text);

// Jobs that a rank has queued and that the ranks have not compared yet.
struct QueuedJobs {
  uint64_t incarnation;        // of the lane: equal on all ranks
  uint64_t first;              // number of the first one, from 1
  std::vector<uint64_t> jobs;  // hashes of their descriptions, in call order; at least one
  std::string first_text;      // description of the first one
  RankSamples samples{};       // of all of them
};

// Equal on all ranks.
struct AgreedJobs {
  size_t count;  // that all ranks may run; at least one
  Weighing weighing;
};

// Note [Agreement on jobs]
// A dynamic lane learns of its jobs one by one, and ranks learn of them at different times. One
// exchange compares all jobs that every rank has queued, so the number of exchanges falls where the
// network is slower than the ranks: jobs then wait in the queue. No job starts before it has been
// compared, or buffers of different sizes would be mixed (Note [Agreement]).
//
// Waits until every rank has queued a job. Throws MismatchError on every rank if the first jobs
// differ, with the descriptions of both sides; a difference further behind ends the result before
// it, and is found by the next call.
AgreedJobs agree_on_jobs(Communicator& communicator, const QueuedJobs& mine);

}  // namespace bagua
