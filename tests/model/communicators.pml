/* Where ranks meet: csrc/comm/communicator.h, as its implementations keep it. */

typedef Place {
  byte brought = NOTHING; /* the collective that this rank waits in */
  byte of_round;
  bool passed;            /* it is complete, and this rank has not gone on yet */
  bool refuses            /* aborted by this rank; in a HUB, by any */
};
typedef Meeting { Place place[RANKS] };
Meeting meeting[LANES + 1];
bool differ;          /* the records that ranks have shown each other */
byte complete[BUCKETS]; /* the round in which the bucket's collective was last complete */

/* Communicator::abort */
inline abort_communicator(r, c) {
  d_step {
    for (i : 0 .. RANKS - 1) {
      if
      :: TRANSPORT == HUB || i == r ->
         meeting[c].place[i].refuses = true;
         if
         :: TRANSPORT != DEAF ->
            meeting[c].place[i].brought = NOTHING;
            meeting[c].place[i].of_round = 0
         :: else
         fi
      :: else
      fi
    }
    i = 0
  }
}

/* A blocking collective. Ranks whose calls differ wait for each other without end, as on plain
   c10d; where all have brought the same, none may be in another round. */
inline collective(r, c, what, ok) {
  if
  :: meeting[c].place[r].refuses -> ok = false
  :: else ->
     d_step {
       meeting[c].place[r].brought = what;
       meeting[c].place[r].of_round = rank[r].round;
       same = true;
       for (i : 0 .. RANKS - 1) { same = same && meeting[c].place[i].brought == what }
       if
       :: same -> complete_collective(c, what)
       :: else
       fi;
       i = 0;
       same = false
     };
#if TRANSPORT == DEAF
end_in_transport:  /* of a lane that was left to itself */
#endif
     if
     :: meeting[c].place[r].passed -> meeting[c].place[r].passed = false; ok = true
     :: TRANSPORT == HUB && meeting[c].place[r].refuses && !meeting[c].place[r].passed -> ok = false
     :: TRANSPORT == LOCAL && meeting[c].place[r].refuses ->
        meeting[c].place[r].passed = false;
        ok = false
     fi
  fi
}

inline complete_collective(c, what) {
  for (i : 1 .. RANKS - 1) {
    if
    :: what == AGREEMENT -> /* agree() compares what all have brought */
       differ = differ || meeting[c].place[i].of_round != meeting[c].place[0].of_round ||
                REVERSED(i) != REVERSED(0)
    :: else -> assert(meeting[c].place[i].of_round == meeting[c].place[0].of_round)
    fi
  }
  if
  :: what < BUCKETS -> complete[what] = meeting[c].place[0].of_round
  :: else
  fi;
  for (i : 0 .. RANKS - 1) {
    meeting[c].place[i].brought = NOTHING;
    meeting[c].place[i].of_round = 0;
    meeting[c].place[i].passed = true
  }
}
