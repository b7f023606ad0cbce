/* The training thread: csrc/engine/engine.cpp, and LaneCore::stop of lane.cpp. */

/* Engine::State::block, inside a step. The code looks at the board with each heartbeat, on a thread
   of its own, the model at once or at any later moment. */
inline block(r, condition) {
  do
#ifndef MISTAKE_WAIT_DOES_NOT_LOOK_AT_FAILURE
  :: rank[r].failure -> goto ended
#endif
  :: (condition) && !rank[r].failure -> break
  :: else ->
     rank[r].asleep[LANES] = true;
     if
     :: !rank[r].asleep[LANES]
     :: rank[r].asleep[LANES] && NEWS(r) -> rank[r].asleep[LANES] = false; goto told
     fi
  od
}

#define IS_MARKED(r, bucket) ((rank[r].marked >> (bucket)) & 1)

/* A slot that has not been marked: any, or the first with -DIN_ORDER. */
inline select_slot(r, slot) {
#ifdef IN_ORDER
  slot = 0;
  do
  :: IS_MARKED(r, slot) -> slot++
  :: else -> break
  od
#else
  if
  :: (rank[r].marked & 1) == 0 -> slot = 0
  :: (rank[r].marked & 2) == 0 && BUCKETS > 1 -> slot = 1
  :: (rank[r].marked & 4) == 0 && BUCKETS > 2 -> slot = 2
  :: (rank[r].marked & 8) == 0 && BUCKETS > 3 -> slot = 3
  fi
#endif
}

#define FIRST(r, l) IN_PLAN(r, rank[r].next[l])

/* The end of Engine::mark_ready: Note [Launch order]. */
inline launch(r, b, l, launches) {
  l = b % LANES;
  launches = false;
#ifdef MISTAKE_BUCKETS_LAUNCH_WHEN_READY
  TASKS(r, l) ! b;
  rank[r].launched++;
  launches = true;
#else
  do
  :: rank[r].next[l] < BUCKETS && FIRST(r, l) % LANES != l -> rank[r].next[l]++
  :: rank[r].next[l] < BUCKETS && FIRST(r, l) % LANES == l && IS_MARKED(r, FIRST(r, l)) ->
     TASKS(r, l) ! FIRST(r, l);
     rank[r].next[l]++;
     rank[r].launched++;
     launches = true
  :: rank[r].next[l] == BUCKETS -> break
  :: rank[r].next[l] < BUCKETS && FIRST(r, l) % LANES == l && !IS_MARKED(r, FIRST(r, l)) -> break
  od;
#endif
  l = 0
}

#define ROUND_DONE(r) \
  (rank[r].launched == rank[r].done && rank[r].used_pending == rank[r].used_done)

#define WAITS_IN(r, c) (meeting[c].place[r].brought != NOTHING)
#define MAY_TAKE_A_SECOND(r, l) (IS_FINE || WAITS_IN(r, l) || (l == 0 && WAITS_IN(r, CONTROL)))

/* LaneCore::stop */
inline stop(r) {
  atomic {
    rank[r].stopped = true;
    failed = rank[r].failure;
    rounds = rank[r].round;
#ifdef MISTAKE_ROUNDS_COUNT_BEFORE_THEY_WERE_WAITED_FOR
    if
    :: rank[r].open && !(rank[r].marked == ALL && ROUND_DONE(r)) -> rounds--
#else
    if
    :: rank[r].open -> rounds--
#endif
    :: else
    fi;
    notify(r);
#ifndef MISTAKE_LEAVING_IS_NOT_PUBLISHED
    if
    :: BOARD && !failed -> left[r] = rounds + 1
    :: else
    fi;
#endif
    rounds = 0;
    forget_round(r)
  };
  MERGED {
    for (l : 0 .. LANES - 1) { /* LaneThread::stop, join_or_leave */
      atomic {
        rank[r].stopping[l] = true;
        do
        :: nempty(TASKS(r, l)) -> TASKS(r, l) ? b
        :: empty(TASKS(r, l)) -> break
        od;
        b = 0;
        if
        :: rank[r].finished[l]
        :: MAY_TAKE_A_SECOND(r, l) && !rank[r].finished[l] -> idle = false /* left to itself */
        fi
      }
    }
    l = 0;
#ifndef MISTAKE_STOPPING_ABORTS_NOTHING
    if
    :: idle
    :: else -> abort_all(r)
    fi
#endif
  }
}

proctype Caller(byte r) {
  byte b, l, rounds;
  bool launches, failed, idle = true;
begin_round: /* Engine::begin_round */
  atomic {
    if
    :: rank[r].failure -> goto ended
    :: !rank[r].failure && rank[r].open && rank[r].marked != ALL -> goto told
#ifdef MISTAKE_ROUNDS_OVERLAP
    :: !rank[r].failure && rank[r].open && rank[r].marked == ALL
#else
    :: !rank[r].failure && rank[r].open && rank[r].marked == ALL -> block(r, ROUND_DONE(r))
#endif
    :: !rank[r].failure && !rank[r].open
    fi;
    forget_round(r);
    rank[r].open = true;
    rank[r].round++;
#ifdef MISTAKE_ROUNDS_START_WITHOUT_AGREEMENT
    rank[r].agreed = rank[r].round
#else
    TASKS(r, 0) ! AGREEMENT
#endif
  };
  do /* Engine::mark_ready, of one slot after the other, in any order */
  :: atomic { rank[r].marked == ALL -> break }
  :: atomic { FAULT == LEAVE -> goto ended }
  :: atomic {
       rank[r].marked != ALL ->
       do
       :: rank[r].failure -> goto ended
       :: FAULT == UNFINISHED && rank[r].marked != 0 -> goto begin_round
       :: !rank[r].failure ->
          select_slot(r, b);
          rank[r].marked = rank[r].marked | (1 << b);
          launch(r, b, l, launches);
          b = 0;
          if
          :: launches || IS_FINE -> launches = false; break
          :: !launches && !IS_FINE
          fi
       od
     }
  od;
  atomic {
    if
    :: FAULT == LEAVE -> goto ended
    :: true
    fi;
#ifdef EXCHANGE
    rank[r].used_pending = true; /* Engine::exchange_used */
    TASKS(r, 0) ! USED;
#endif
    if
    :: rank[r].round < ROUNDS -> goto begin_round /* which waits for this round */
    :: true
    fi;
    block(r, ROUND_DONE(r)); /* Engine::wait */
    for (b : 0 .. BUCKETS - 1) { assert(complete[b] == rank[r].round) }
    b = 0;
    rank[r].open = false;
    if
    :: rank[r].round < ROUNDS -> goto begin_round
    :: else -> goto ended
    fi
  };
told:
  MERGED { fail(r) };
ended:
  stop(r);
end_of_caller:
  false
}
