/* The doorbell: no wake-up is lost.
 *
 * Models struct Bell of src/shm/bell.h (ring(), steps 1 to 5; sleep(), steps a to e), futex_wait() and
 * futex_wake_all() of src/shm/futex.h, and what Channel::wait() and Channel::fail() of
 * src/comm/backends/shm/channel.cpp do with them. Rank 0 publishes the values 1 … ROUNDS and rings its bell after each;
 * every other rank waits on that bell for each value in turn, first spinning, then asleep. With -DCRASH any one rank is
 * killed at any step; then the watch of every survivor aborts the group and rings too, so there are several ringers.
 *
 * Memory. Every thread has a store buffer: what it stores, counting atomic additions, reaches the memory later, in
 * order, at a moment of the model's choosing, and its loads do not wait for that. A seq_cst fence waits until the
 * buffer is empty; so does futex_wake(), a full barrier in the kernel. An addition may thus lag behind later loads, as
 * on processors whose atomic additions are not barriers; where they are, some of these runs cannot happen. A killed
 * thread's buffer still empties. No thread loads a word that waits in its own buffer, so nothing is forwarded.
 *
 * Steps. `atomic` joins a load with the thread's own next entries into its buffer, which nobody else can see yet, and a
 * fence with the load after it: this leaves out no run, it only makes fewer states.
 *
 * Left out: the futex's time limit, so that nothing can depend on it; overflow of the 32-bit words; loads out of order,
 * which the acquire loads at b and c forbid (MUTANT_SEEN_LATE is what they prevent).
 *
 * Checked: every rank ends in every run (ltl every_rank_ends: neither deadlock nor endless loop); without a crash no
 * wait fails.
 */
#ifndef RANKS
#define RANKS 2
#endif
#ifndef ROUNDS
#define ROUNDS 2
#endif
#define NOBODY 255
#define BIT(rank) (1 << (rank))
#define WATCH_OF(rank) (RANKS + (rank) - 1) /* its thread; rank r's own is thread r */

mtype = { VALUE, ABORT, WORD, WAITER_COMES, WAITER_GOES };
chan buffer[2 * RANKS - 1] = [2] of { mtype };

byte value;   /* what the waiters wait for; each store adds one */
bool aborted; /* GroupHeader::abort != 0 */
byte word;    /* Bell::word */
byte waiters; /* Bell::waiters */
byte asleep;  /* the kernel's queue on `word`, a bit a rank */
byte dead = NOBODY;
#define LIVES (_pid != dead + 1) /* init is process 0, and rank r process r + 1 */
byte ended;   /* ranks that have returned, thrown or died, a bit each */

#define STORE(thread, entry) buffer[thread] ! entry
#define FENCE(thread) empty(buffer[thread])

#define ARRIVES(thread)                                                                                         \
  atomic {                                                                                                      \
    buffer[thread] ? entry ->                                                                                   \
      if                                                                                                        \
      :: entry == VALUE -> value++                                                                              \
      :: entry == ABORT -> aborted = true                                                                       \
      :: entry == WORD -> word++                                                                                \
      :: entry == WAITER_COMES -> waiters++                                                                     \
      :: entry == WAITER_GOES -> waiters--                                                                      \
      fi;                                                                                                       \
      entry = 0                                                                                                 \
  }

proctype Memory() {
  mtype entry;
end:
  do
  :: ARRIVES(0)
  :: ARRIVES(1)
  :: ARRIVES(2)
#if RANKS > 2
  :: ARRIVES(3)
  :: ARRIVES(4)
#endif
  od
}

inline futex_wake(thread) {
#ifdef MUTANT_WAKE_ONE
  atomic { FENCE(thread) -> asleep = asleep & (asleep - 1) }
#else
  atomic { FENCE(thread) -> asleep = 0 }
#endif
}

#ifdef MUTANT_NO_RING_FENCE
#define RING_FENCE(thread) true
#else
#define RING_FENCE(thread) FENCE(thread)
#endif

inline ring(thread) {
  if                                                               /* 2, 3 */
#ifdef MUTANT_WAKE_FIRST
  :: RING_FENCE(thread) && waiters != 0 -> futex_wake(thread); STORE(thread, WORD)
#else
  :: atomic { RING_FENCE(thread) && waiters != 0 -> STORE(thread, WORD) }; /* 4 */
     futex_wake(thread)                                            /* 5 */
#endif
  :: RING_FENCE(thread) && waiters == 0
  fi
}

/* Asleep until a wake-up takes the bit away; `seen` decides in the same step as falling asleep. */
inline futex_wait() {
#ifdef MUTANT_FUTEX_TORN
  if
  :: word == seen -> asleep = asleep | BIT(me)
  :: else
  fi;
#else
  atomic {
    if
    :: word == seen -> asleep = asleep | BIT(me)
    :: else
    fi
  };
#endif
  !(asleep & BIT(me))
}

proctype Publisher() provided (LIVES) {
  byte published;
  do
  :: atomic { published < ROUNDS -> published++; STORE(0, VALUE) }; /* 1 */
     ring(0)
  :: atomic { published == ROUNDS -> ended = ended | BIT(0); break }
  od
}

proctype Waiter(byte me) provided (LIVES) {
  byte wanted = 1, seen;
  do
  /* Spinning, and ready() after a sleep. */
  :: atomic { value >= wanted && wanted < ROUNDS -> wanted++ }
  :: atomic { value >= wanted && wanted == ROUNDS -> ended = ended | BIT(me); break }
  :: value < wanted ->
    atomic {
      if
      :: aborted -> assert(dead != NOBODY); ended = ended | BIT(me); break
      :: else -> STORE(me, WAITER_COMES)     /* a */
      fi
    };
    atomic {
#ifndef MUTANT_NO_SLEEP_FENCE
      FENCE(me) ->
#endif
        seen = word                          /* b */
    };
#ifndef MUTANT_NO_RECHECK
    if                                       /* c, two loads */
    :: value >= wanted
    :: else ->
      if
      :: aborted
      :: else ->
#ifdef MUTANT_SEEN_LATE
        seen = word;
#endif
        futex_wait()                         /* d */
      fi
    fi;
#else
    futex_wait();
#endif
    atomic { seen = 0; STORE(me, WAITER_GOES) } /* e */
  od
}

#ifdef CRASH
#define DIES(rank) atomic { dead = rank; ended = ended | BIT(rank) }

proctype Killer() {
  if
  :: DIES(0)
  :: DIES(1) /* stands for any waiter */
  fi
}

/* PeerWatch's callback on a rank that waits: Channel::fail(). */
proctype Watch(byte me) {
end:
  atomic { dead != NOBODY && dead != me -> STORE(WATCH_OF(me), ABORT) };
#ifndef MUTANT_SILENT_ABORT
  ring(WATCH_OF(me))
#endif
}
#endif

init {
  atomic {
    run Publisher();
    run Waiter(1);
#if RANKS > 2
    run Waiter(2);
#endif
    run Memory();
#ifdef CRASH
    run Killer();
    run Watch(1);
#if RANKS > 2
    run Watch(2);
#endif
#endif
  }
}

ltl every_rank_ends { <> (ended == BIT(RANKS) - 1) }
