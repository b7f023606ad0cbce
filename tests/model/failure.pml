/* How a rank fails: csrc/engine/lane.cpp. */

/* What LaneCore::end_with and stop end with. */
inline abort_all(r) {
  abort_communicator(r, CONTROL);
  abort_communicator(r, 0);
#if LANES > 1 && !defined(MISTAKE_ABORT_FORGETS_A_LANE)
  abort_communicator(r, 1);
#endif
}

/* What a round starts from; after a failure and at the end nobody looks at it any more, and there
   are fewer states if it is always the same. */
inline forget_round(r) {
  d_step {
    rank[r].open = false;
    rank[r].marked = 0;
    rank[r].launched = 0;
    rank[r].done = 0;
    rank[r].used_pending = false;
    rank[r].used_done = false;
    for (i : 0 .. LANES - 1) { rank[r].next[i] = 0 }
    i = 0
  }
}

/* Of a rank that has failed: its lanes would take the tasks, and return at once. */
inline forget_tasks(r) {
  d_step {
    for (i : 0 .. LANES - 1) {
      do
      :: nempty(TASKS(r, i)) -> TASKS(r, i) ? same
      :: empty(TASKS(r, i)) -> break
      od
    }
    i = 0;
    same = 0
  }
}

/* LaneCore::end_with */
inline fail(r) {
  if
  :: atomic { rank[r].failure || rank[r].stopped -> skip }
  :: MERGED {
       atomic {
         !rank[r].failure && !rank[r].stopped ->
         assert(FAULT != NONE);
         rank[r].failure = true;
#ifndef MISTAKE_FAILURE_WAKES_NOBODY
         notify(r)
#endif
       };
#ifndef MISTAKE_FAILURE_IS_NOT_PUBLISHED
       d_step {
         if
         :: BOARD && first_failed == NOTHING -> first_failed = r
         :: else
         fi
       };
#endif
       abort_all(r);
#ifndef FINE
       forget_tasks(r);
       forget_round(r)
#endif
     }
  fi
}
