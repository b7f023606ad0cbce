// Explains a failure: the only place that composes "why".
#pragma once

#include <exception>

#include "health/failure_board.h"

namespace bagua {

// Note [Diagnosis]
// Whatever meets other ranks (a round, an eager call, a wrap, an average) can fail because of them.
// A diagnosis begins with the verdict: the rank that failed first by itself, else one that exited,
// else those that are silent, behind, ahead or still computing. One line per fact follows: other
// ranks that failed too, what they said, and last what this rank saw, with the transport's own
// reason. A rank that failed because another did is never the verdict: where nobody is to blame, as
// when all ranks fail alike, what this rank saw comes first. A failure that is this rank's own
// needs no verdict and stays unchanged.

// The exception with a diagnosis as its text, of the same type, or a MismatchError where all ranks
// failed alike. `cause`: this rank's own error, which says its position. Takes up to two seconds:
// heartbeats are read twice.
std::exception_ptr diagnose(const std::exception_ptr& cause, const Position& position,
                            FailureBoard& board);

}  // namespace bagua
