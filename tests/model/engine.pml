/* Launch order, agreement, failure and end of an engine, for spin.

   RANKS ranks, each with a caller (the training thread) and LANES lane threads. Bucket b has one
   slot and is in lane b % LANES. Every rank makes ROUNDS rounds, marks its slots in any order, and
   ends; of the FAULTs below one kind may come in between, at any moment.

   A step is what the code does under one lock, or one call of a transport or store. Nothing here
   has a deadline: what ends, ends by itself. No execution has a cycle (`pan -l` with -DNP), so that
   where no end state is invalid every wait ends, whatever the scheduler does. What the model
   leaves out: tests/README.md, Concurrency. tests/deep/test_model.py runs it. */

#ifndef RANKS
#define RANKS 2
#endif
#ifndef LANES
#define LANES 2
#endif
#ifndef BUCKETS
#define BUCKETS 3
#endif
#ifndef ROUNDS
#define ROUNDS 2
#endif

/* What a communicator's abort ends, and where it is felt.
   HUB   ThreadCommunicator: calls in flight of all ranks.
   LOCAL NCCL: this rank's call in flight; others are not told.
   DEAF  gloo: later calls of this rank only; a call in flight stays until the others come. */
#define HUB 0
#define LOCAL 1
#define DEAF 2
#ifndef TRANSPORT
#define TRANSPORT HUB
#endif

/* What may happen, once or often, or not at all.
   ABORT       a thread of rank 0 that is neither its caller nor a lane calls Engine::abort.
   THROW       an op throws before or after its collective, on any rank.
   LEAVE       a rank stops its engine, in any state of any round.
   UNFINISHED  a rank begins a round without having marked all slots of the one before.
   OTHER_PLAN  the last rank has its buckets in reverse order, and so another fingerprint. */
#define NONE 0
#define ABORT 1
#define THROW 2
#define LEAVE 3
#define UNFINISHED 4
#define OTHER_PLAN 5
#ifndef FAULT
#define FAULT NONE
#endif
#ifndef BOARD
#define BOARD 1 /* 0: EngineOptions::board is null */
#endif

/* Steps in a row that nobody can tell from one are one, unless -DFINE: between them others can only
   do what they could do before the first or after the last. */
#ifdef FINE
#define IS_FINE true
#define MERGED
#else
#define IS_FINE false
#define MERGED atomic
#endif

/* Each -DMISTAKE_... makes the model wrong in a way that spin must find. */

#define CONTROL LANES /* the communicator of agreements; those before it belong to lanes */
#define AGREEMENT BUCKETS
#define USED (BUCKETS + 1)
#define NOTHING 255
#define ALL ((1 << BUCKETS) - 1)

hidden byte i, same; /* scratch, within one step */

#include "state.pml"
#include "communicators.pml"
#include "failure.pml"
#include "lane.pml"
#include "caller.pml"

/* Engine::abort from a thread of its own. */
proctype Aborter(byte r) {
end_without_abort:
  MERGED { fail(r) };
end_of_aborter:
  false
}

init {
  byte r, l;
  atomic {
    for (r : 0 .. RANKS - 1) {
      run Caller(r);
      for (l : 0 .. LANES - 1) { run Lane(r, l) }
    }
    if
    :: FAULT == ABORT -> run Aborter(0)
    :: else
    fi
  }
}
