// The 32 bytes that every rank shows every other at the start of a round.
#pragma once

#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "comm/communicator.h"

namespace bagua {

// What ranks must have in common before bytes of a round are mixed.
struct AgreementRecord {
  uint64_t fingerprint;  // of the plan: buckets, slots, ops
  uint64_t round;        // number of the round, from 1
  uint64_t incarnation;  // of the run: restarts and re-wraps differ
  uint64_t flags;        // reserved, 0
};
static_assert(sizeof(AgreementRecord) == 32);

// Note [Agreement]
// gloo mixes whatever it is given: all_reduce of different sizes aborts one rank and returns wrong
// sums on the other. So no bucket of a round starts before all ranks have shown the same plan and
// the same round. The exchange runs on a communicator of its own, from the start of forward, hidden
// behind the forward pass.
//
// Throws MismatchError naming the first field that differs and every rank's value.
void agree(Communicator& communicator, const AgreementRecord& mine);

}  // namespace bagua
