/* What the threads of a rank share, and what ranks tell each other beside the wire:
   csrc/engine/engine.cpp, lane.h, lane_thread.cpp, csrc/health/failure_board.h. */

/* Engine::State and LaneThread::State of each rank. */
typedef Rank {
  bool failure, stopped, open;
  byte round, agreed;
  byte marked;       /* by bit */
  byte launched, done;
  bool used_pending, used_done;
  byte next[LANES];  /* LaneState::next: a position in the plan */
  bool asleep[LANES + 1]; /* in changed.wait(): each lane, and at LANES the caller */
  bool stopping[LANES], finished[LANES]
};
Rank rank[RANKS];
chan tasks[RANKS * LANES] = [BUCKETS + 2] of { byte };
#define TASKS(r, l) tasks[(r) * LANES + (l)]

/* The bucket at a position of a rank's plan, which its fingerprint stands for. */
#define REVERSED(r) (FAULT == OTHER_PLAN && (r) == RANKS - 1)
#define IN_PLAN(r, position) (REVERSED(r) -> BUCKETS - 1 - (position) : (position))

/* FailureBoard. */
byte first_failed = NOTHING;
byte left[RANKS]; /* rounds + 1 */

#define LEFT_BEFORE(r, other) (left[other] != 0 && left[other] - 1 < rank[r].round)
#if RANKS == 2
#define ANYBODY_LEFT(r) (LEFT_BEFORE(r, 0) || LEFT_BEFORE(r, 1))
#else
#define ANYBODY_LEFT(r) (LEFT_BEFORE(r, 0) || LEFT_BEFORE(r, 1) || LEFT_BEFORE(r, 2))
#endif
/* FailureBoard::poll and poll_exit. */
#define NEWS(r) (BOARD && ((first_failed != NOTHING && first_failed != r) || ANYBODY_LEFT(r)))

/* changed.notify_all() */
inline notify(r) {
  d_step {
    for (i : 0 .. LANES) { rank[r].asleep[i] = false }
    i = 0
  }
}

/* changed.wait(lock, condition): sleeps until it is notified, and looks again. */
inline wait_for(r, who, condition) {
  do
  :: condition -> break
  :: else -> rank[r].asleep[who] = true; !rank[r].asleep[who]
  od
}
