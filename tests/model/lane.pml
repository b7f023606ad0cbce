/* A lane thread: csrc/engine/lane_thread.cpp, engine.cpp, agreement.cpp. */

/* LaneThread::State::loop */
proctype Lane(byte r; byte l) {
  byte task;
  bool ok;
idle:
  atomic {
    task = 0;
    ok = false;
    if
    :: rank[r].stopping[l] -> rank[r].finished[l] = true; goto over
    :: !rank[r].stopping[l] && nempty(TASKS(r, l)) -> TASKS(r, l) ? task
    fi;
    if
    :: task == AGREEMENT -> /* State::run_agreement */
       collective(r, CONTROL, AGREEMENT, ok);
       if
       :: ok && !differ -> rank[r].agreed = rank[r].round
       :: else -> goto failed
       fi
    :: else -> /* State::run_bucket, and State::run_exchange_used */
#ifdef MISTAKE_LANES_WAIT_FOR_AGREEMENT_ONLY
       wait_for(r, l, rank[r].agreed == rank[r].round);
#else
       wait_for(r, l, rank[r].failure || rank[r].stopped || rank[r].agreed == rank[r].round);
#endif
       if
       :: rank[r].failure || rank[r].stopped -> goto idle
       :: else
       fi;
       if
       :: FAULT == THROW && task != USED -> goto failed /* before its collective */
       :: true
       fi;
       collective(r, (task == USED -> CONTROL : l), task, ok);
       if
       :: !ok || (FAULT == THROW && task != USED) -> goto failed /* or after it */
       :: ok
       fi;
       if
       :: rank[r].stopped || rank[r].failure
       :: !(rank[r].stopped || rank[r].failure) && task == USED -> rank[r].used_done = true
       :: !(rank[r].stopped || rank[r].failure) && task != USED -> rank[r].done++
       fi
    fi;
    notify(r);
    goto idle
  };
failed:
  MERGED { fail(r) };
  goto idle;
over:
end_of_lane:
  false
}
