/* Turns: turn buffers are never overwritten before all peers are done with them, every rank reads exactly the data of
 * its turn, and a pipeline's waits do not stop it. And the direct tier, which shares the counters.
 *
 * Models Turns (stage(), staged(), reduced(), done(), await_…()) of src/comm/backends/shm/turns.h, publish() and
 * await_all() of channel.cpp, StagedPipeline, direct_tier() and in_place_tier() of all_reduce.cpp, from_root() and
 * from_all() of movement.cpp; waiting, failure and death are channel.pml's. All ranks call the same OPS operations of any kinds:
 *
 *   FROM_ROOT  broadcast and scatter: the last rank stages, the others take
 *   FROM_ALL   all_gather, reduce_scatter, all_to_all: all stage, all take
 *   TO_ROOT    gather: all stage, only the last rank takes
 *   PIPELINE   staged all_reduce and reduce: copy in, reduce in the peers' buffers, copy out, of three turns at a time
 *   DIRECT     reduces slices of memory that is there before the announcement: the tensors themselves, on the heaps, or
 *              the one early buffer of each rank
 *
 * begin_operation() is here only "announce, wait for all"; slots.pml has its data. A turn buffer has a slice for each rank, and a
 * slice's content is the mark of the turn that wrote it, or mark + REDUCED. To change data and to publish them is one
 * step, and so is to read and to say so: waits are monotone, so where an error needs the two apart there is also a run
 * in which they are not. Ringing is a step of its own.
 *
 * BUFFERS is kTurnBuffers, which is 4: fewer are harder. 3 is the least: with 2 the pipeline overtakes itself, because a
 * rank copies turn i - 2 out of its buffer only after it has staged turn i (run.sh sees that it does). Of its own buffer
 * nobody else reads or writes anything once a turn is reduced, so the pipeline needs no `done`.
 *
 * Checked: every read finds the data of its turn (assert); without -DCRASH no operation throws; every rank ends in
 * every run (ltl every_rank_ends).
 */
#ifndef RANKS
#define RANKS 2
#endif
#ifndef OPS
#define OPS 2
#endif
#ifndef BUFFERS
#define BUFFERS 3
#endif
#define TURNS (BUFFERS + 1) /* of one operation, but DIRECT */
#define ROOT (RANKS - 1)
#define REDUCED 100

#define RING_AT_ONCE /* nobody leaves while another still needs it */
#include "channel.pml"

mtype = { FROM_ROOT, FROM_ALL, TO_ROOT, PIPELINE, DIRECT };
mtype kind[OPS];

byte announced[RANKS];                            /* Slot::seq */
byte staged[RANKS], reduced[RANKS], done_with[RANKS]; /* RankControl */
byte buffer[RANKS * BUFFERS * RANKS];
byte tensor[RANKS * RANKS];                       /* for DIRECT: 2 * operation, + 1 when reduced */

#define KIND kind[op - 1]
#define STAGES(rank) (KIND != FROM_ROOT || rank == ROOT)
#define TAKES(rank) (KIND == PIPELINE || KIND == FROM_ALL || (KIND == TO_ROOT) == (rank == ROOT))

#define MARK(turn) (first + (turn) + 1)
#define SLICE(rank, turn, slice) buffer[((rank) * BUFFERS + (first + (turn)) % BUFFERS) * RANKS + (slice)]
#define TENSOR(rank, slice) tensor[(rank) * RANKS + (slice)]

#define FOR_EACH_RANK(what)                                                                                     \
  r = 0;                                                                                                        \
  do                                                                                                            \
  :: r < RANKS -> what; r++                                                                                     \
  :: else -> r = 0; break                                                                                       \
  od

/* Turns::stage(), the copy into the buffer, Turns::staged(). The pipeline does not wait, and leaves its own slice. */
inline stage() {
#ifndef MUTANT_NO_DONE
  if
  :: KIND != PIPELINE && i >= BUFFERS -> wait_all(done_with[p] >= MARK(i - BUFFERS))
  :: else
  fi;
#endif
#ifdef MUTANT_FLAG_FIRST
  staged[me] = MARK(i);
#endif
  atomic {
    FOR_EACH_RANK(SLICE(me, i, r) = (KIND == PIPELINE && r == me -> SLICE(me, i, r) : MARK(i)));
    staged[me] = MARK(i)
  };
  RING(me)
}

/* from_root() and from_all() take what is staged in turn i; the pipeline reduces what was staged in the turn before. */
#define TURN (i - (KIND == PIPELINE -> 1 : 0))
inline take() {
  wait_all(!STAGES(p) || staged[p] >= MARK(TURN));
#ifdef MUTANT_DONE_FIRST
  done_with[me] = MARK(TURN);
#endif
  atomic {
    FOR_EACH_RANK(assert(r == me || !STAGES(r) || SLICE(r, TURN, me) == MARK(TURN)));
    if
    :: KIND == PIPELINE ->
       FOR_EACH_RANK(SLICE(r, TURN, me) = (r == me -> SLICE(me, TURN, me) : MARK(TURN) + REDUCED));
       reduced[me] = MARK(TURN)
    :: else -> done_with[me] = MARK(TURN)
    fi
  };
  RING(me)
}

inline copy_out(turn) {
#ifndef MUTANT_NO_REDUCED
  wait_all(reduced[p] >= MARK(turn));
#endif
  atomic { FOR_EACH_RANK(assert(r == me || SLICE(me, turn, r) == MARK(turn) + REDUCED)) }
}

inline direct() {
  atomic {
    FOR_EACH_RANK(assert(TENSOR(r, me) == 2 * op); TENSOR(r, me) = 2 * op + 1);
    reduced[me] = MARK(0)
  };
  RING(me);
#ifndef MUTANT_ONE_SYNC
  wait_all(reduced[p] >= MARK(0));
#endif
  atomic { FOR_EACH_RANK(assert(TENSOR(me, r) == 2 * op + 1)) }
}

proctype Rank(byte me) provided (LIVES) {
  byte op = 1, first, i, p, r, b;
  do
  :: op > OPS -> break
  :: op <= OPS ->
     check();
     atomic {
       FOR_EACH_RANK(TENSOR(me, r) = (KIND == DIRECT -> 2 * op : 0));
       announced[me] = op
     };
     RING(me);
#ifndef MUTANT_NO_ENTER
     wait_all(announced[p] >= op);
#endif
     do
     :: KIND == DIRECT -> direct(); first++; break
     :: KIND != DIRECT && i < TURNS + (KIND == PIPELINE -> 2 : 0) ->
        if
        :: i < TURNS && STAGES(me) -> stage()
        :: else
        fi;
        if
        :: 0 <= TURN && TURN < TURNS && TAKES(me) -> take()
        :: !TAKES(me) -> done_with[me] = MARK(i); RING(me)
        :: else
        fi;
        if
        :: KIND == PIPELINE && i >= 2 -> copy_out(i - 2)
        :: else
        fi;
        i++
     :: KIND != DIRECT && i == TURNS + (KIND == PIPELINE -> 2 : 0) ->
        atomic { first = first + TURNS; i = 0; break }
     od;
     op++
  od;
thrown:
#ifndef CRASH
  assert(op > OPS);
#endif
  atomic {
    op = 0;
    first = 0;
    i = 0;
    p = 0;
    leave()
  }
}

inline choose(a_kind) {
#ifdef ONLY
  a_kind = ONLY
#else
  if
  :: a_kind = FROM_ROOT
  :: a_kind = FROM_ALL
  :: a_kind = TO_ROOT
  :: a_kind = DIRECT
#if BUFFERS > 2
  :: a_kind = PIPELINE
#endif
  fi
#endif
}

init {
  byte b;
  atomic {
    choose(kind[0]);
#if OPS > 1
    choose(kind[1]);
#endif
    start_everybody()
  }
}
