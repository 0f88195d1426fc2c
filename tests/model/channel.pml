/* What slots.pml and turns.pml share: waiting, failure, leaving, death.
 *
 * Models Channel::wait(), check(), fail(), peer_left(), ring_everybody(), leave() and the watch's callback (in the
 * constructor) of src/comm/backends/shm/channel.cpp; the watch itself, src/shm/peer_watch.cpp, is "learns of a death
 * at any later moment". With -DCRASH any one rank is killed at any step.
 *
 * A bell does what bell.pml proves of one: to look at the condition and to fall asleep is one step, and a ring wakes
 * all who sleep. To publish and to ring are two. Spinning is a look before the sleep's own, so it needs no separate
 * case. Memory is in order: what a rank learns here of another it learns by an acquire load of what that one stored
 * with release, before which that one did all that matters. Only the bell needs more than that.
 *
 * Left out: deadlines, mismatches, abort(), injected faults. All of them end in fail(), as a lost peer does. What a
 * failure's report says: failure.pml.
 *
 * A rank is a process `Rank(me)` with variables p and b, 0 between uses, and a label `thrown` for its waits to go to.
 * Its model defines RING_AT_ONCE if no rank relies on what another does before it has rung all bells.
 */
#define NOBODY 255
#define BIT(rank) (1 << (rank))

bool aborted;       /* GroupHeader::abort != 0 */
bool left[RANKS];   /* RankControl::presence == kLeft */
byte asleep[RANKS]; /* on the bell of a rank: a bit for each sleeper */
byte dead = NOBODY;
#define LIVES (_pid != dead + 1) /* init is process 0, and rank r process r + 1 */

#define RING(bell) asleep[bell] = 0

inline ring_everybody() {
#ifdef RING_AT_ONCE
  atomic {
#endif
    do
    :: atomic { b < RANKS - 1 -> RING(b); b++ }
    :: atomic { b == RANKS - 1 -> RING(b); b = 0; break }
    od
#ifdef RING_AT_ONCE
  }
#endif
}

inline check() {
  if
  :: aborted -> goto thrown
  :: else
  fi
}

/* Waits until `ready` holds for every p but me, one after the other. A look takes in all that are ready and falls
 * asleep on the bell of the first that is not. A rank that wakes up to a failure throws, also if p is ready by
 * now. If p has left, that is not a failure if it first did what is waited for, so this needs a last look. */
inline wait_all(ready) {
  do
  :: atomic {
       do
       :: p < RANKS && (p == me || (ready)) -> p++
       :: else -> break
       od;
       if
       :: p == RANKS -> p = 0; break
       :: p < RANKS ->
          if
          :: !aborted && !left[p] -> asleep[p] = asleep[p] | BIT(me)
          :: else
          fi
       fi
     };
     atomic {
       !(asleep[p] & BIT(me)) ->
         check()
     };
     if
     :: !left[p]
#ifndef MUTANT_NO_LAST_LOOK
     :: atomic { left[p] && (ready) -> p++ }
     :: atomic { left[p] && !(ready) -> aborted = true }; /* peer_left() */
#else
     :: atomic { left[p] -> aborted = true };
#endif
        ring_everybody();
        goto thrown
     fi
  od
}

inline leave() {
  left[me] = true;
#ifndef MUTANT_SILENT_LEAVE
  ring_everybody()
#endif
}

#ifdef CRASH
proctype Killer() {
  if
  :: dead = 0
  :: dead = 1
#if RANKS > 2
  :: dead = 2
#endif
  fi
}

#ifdef MUTANT_WATCH_IGNORES_LEFT
#define LEARNS (dead != NOBODY && !left[dead])
#else
#define LEARNS (dead != NOBODY)
#endif

/* The survivors' watches: the first that learns of the death. What the others do is the same again. Nothing stops it on
 * the way, so it rings in one step. */
proctype Watch() {
  byte b;
end:
  atomic {
    LEARNS -> aborted = aborted || !left[dead]; /* who has left may die, but whoever waits for it must look again */
#ifdef RING_AT_ONCE
    ring_everybody()
  }
#else
  };
#ifndef MUTANT_SILENT_ABORT
  atomic { ring_everybody() }
#endif
#endif
}
#endif

inline start_everybody() {
  do
  :: b < RANKS -> run Rank(b); b++
  :: else -> b = 0; break
  od;
#ifdef CRASH
  run Watch();
  run Killer()
#endif
}

#if RANKS > 2
#define EVERY(ended) (ended(0) && ended(1) && ended(2))
#else
#define EVERY(ended) (ended(0) && ended(1))
#endif
#define ENDED(rank) (left[rank] || dead == rank)

ltl every_rank_ends { <> EVERY(ENDED) }
