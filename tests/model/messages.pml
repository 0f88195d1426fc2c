/* Messages between two ranks of a group: each receive gets its message whole and once, also when the sender has left.
 *
 * Models src/comm/backends/shm/messages.cpp: run(), submit(), post(), progress(), push(), pull(), put_aside(),
 * match_aside(), report(), check_peers(), check_receives_of_any(), sleep_until_moved(), work() and stop(); and fail() and
 * leave() of channel.cpp, as far as they ring the inbox bells. The ring is a stream of cells, without records: a message
 * has a header of one cell and DATA cells behind it, and flows through a ring of RING cells as its receiver reads.
 *
 * Rank 1 sends two messages, of tag 0 and of tag 1, in either order, and leaves immediately. Rank 0 receives tag 1, then tag
 * 0, and leaves. So a message is put aside in some runs. All of them are blocking calls on the ranks' own threads;
 *
 *   -DASYNC=1  rank 0 submits the receive of tag 0, and a second thread of it (work()) moves what nobody waits for
 *   -DASYNC=2  rank 1 submits both sends, and has such a thread
 *   -DASYNC=3  both
 *   -DPIECES   a message moves in pieces of any size, and a turn may end after any of them (kPiece, kTurn)
 *   -DREFERENCE  the ring has only the headers, and rank 0 copies the data from rank 1's heap: is_copied(), copy_reference()
 *   -DGIVES_UP   rank 1 submits one send and leaves without waiting for it; only with REFERENCE
 *   -DFAILS      rank 1 may fail the group while its send waits (a deadline has passed)
 *   -DANY      the receives are from any source
 *   -DSHORT    rank 1 leaves when it has sent its first message
 *   -DQUITS    rank 0 leaves when its first receive has ended
 *
 * A bell does what bell.pml proves of one: a ring that comes after a sleeper's count is up (step a) ends that sleep, or
 * its look at the condition comes after the ring. The condition here is progress(), which has many steps. So the sleeper
 * first forgets the rings until then, looks, and sleeps until the next ring. Memory is in order, as in channel.pml: there
 * is no other order between two ranks than that of a counter and what was written before it.
 *
 * Steps. What a thread does under its rank's lock is one step from one access to shared memory to the next. To copy
 * data and to publish the counter is one step: the other side looks at the data only behind the counter.
 *
 * A message of which all comes together (RecordLine::kWhole) is one whose cells come in one step.
 *
 * Left out: send_now(), receive_now() and find(), which refuse if anything is under way; messages that do not fit;
 * callbacks of futures, before which a thread hands over what is pending (let_work()); the death of a rank, which ends
 * in the same fail() (slots.pml); all time limits, also kNap, so nothing can depend on them, except that a rank may look
 * for peers that have left at any time (progress(), next_check_).
 *
 * Checked: a receive that completes has its own message, whole; nothing fails unless the other rank has left too early
 * (assert); every thread ends in every run (ltl every_thread_ends).
 */
#ifndef DATA
#define DATA 2
#endif
#ifndef RING
#define RING 2
#endif
#ifndef ASYNC
#define ASYNC 0
#endif
#define CELLS (DATA + 1)
#define HEADER 10 /* + tag; data cells hold tag + 1 */
#define NONE 2

/* In shared memory. */
byte cell[RING];
byte written, read;
byte copied;                   /* messages by reference */
bool left[2], failed;
bool closing[2];               /* Channel::stopping_: of one rank, for its own threads */

/* Of the ranks. */
bool locked[2], stopping[2];
bool complete[2], broken[2];   /* the receives, by tag */
bool posted[2], aside[2];      /* in receives_; put aside whole */
bool header_read;              /* Incoming: */
byte target = NONE, to_aside = NONE, header, data_read;
byte sends, sent, moved;       /* posted; complete; cells of the one under way */
byte first_tag;
bool send_broken;
bool torn;                     /* the data changed while rank 0 copied it: its send had ended */
bool rung[4];                  /* by thread: 2 * rank, + 1 for the second one */
bool work_asleep[2], second_ended[2], ended[2];
bool awaiting[2];              /* the first thread is in move_until(): then the second one leaves the work to it */
#define FIRST(rank) (2 * (rank))
#define SECOND(rank) (2 * (rank) + 1)

#define LOCK(rank) atomic { !locked[rank] -> locked[rank] = true }
#define RING_INBOX(rank) atomic { rung[FIRST(rank)] = true; rung[SECOND(rank)] = true }
#define TAG(message) ((message) == 0 -> first_tag : 1 - first_tag)
#define EXPECTED(message, at) ((at) == 0 -> HEADER + TAG(message) : TAG(message) + 1)

#define FAILED(rank) (failed || closing[rank])
#define SENDING (sends > sent)
#define POSTED (posted[0] || posted[1])
#define IS_PENDING ((rank == 0 && (POSTED || target != NONE)) || (rank == 1 && SENDING))
#define RECEIVING (POSTED || target != NONE || to_aside != NONE)

#include "messages_moving.pml"

/* With the lock. Not a word about deadlines. */
inline lose() {
#if defined(SHORT) || defined(GIVES_UP)
  assert(rank == 0 || left[1]);
#elif defined(FAILS)
  assert(failed); /* and so the ranks left */
#else
#ifdef QUITS
  assert(rank == 1 || left[0]);
#else
  assert(false); /* everything was sent before anybody left */
#endif
#endif
  failed = true;
  atomic { RING_INBOX(0); RING_INBOX(1) };
  atomic { fail_all(rank) }
}

/* check_peers() and check_receives_of_any(). What has begun to arrive has a source. */
inline check_peers() {
#ifdef ANY
#define KNOWN_SOURCE (rank == 1 || target != NONE)
#else
#define KNOWN_SOURCE true
#endif
  if
  :: KNOWN_SOURCE ->
#ifdef MUTANT_EMPTY_FIRST
     empty_ring = (written == read);
     gone = left[1 - rank];
#else
     gone = left[1 - rank];
     empty_ring = (written == read);
#endif
     if
#if defined(REFERENCE) && !defined(MUTANT_LEFT_IS_LOST)
     :: gone && rank == 1 && copied > sent /* it left after that */
     :: gone && ((rank == 0 && empty_ring) || (rank == 1 && copied <= sent)) -> lose()
#else
     :: gone && (empty_ring || rank == 1) -> lose()
#endif
     :: else
     fi
#ifdef ANY
  :: !KNOWN_SOURCE ->
#ifndef MUTANT_ANY_EMPTY_FIRST
     gone = left[1];
     empty_ring = (written == read);
#else
     empty_ring = (written == read);
     gone = left[1];
#endif
     if
     :: gone && empty_ring -> lose()
     :: else
     fi
#endif
  fi;
  atomic { gone = false; empty_ring = false }
}

/* Whether anything moved: `result`. */
inline progress() {
  LOCK(rank);
  if
  :: rank == 0 -> pull()
  :: rank == 1 -> push()
  fi;
  if
  :: IS_PENDING ->
     if
     :: FAILED(rank) -> atomic { fail_all(rank) }
#ifdef FAILS
     :: !failed && rank == 1 -> failed = true; atomic { RING_INBOX(0); RING_INBOX(1) }; atomic { fail_all(rank) }
#endif
     :: !FAILED(rank) && (listens || any || completed) -> check_peers()
     :: !FAILED(rank) && !listens
     fi
  :: else
  fi;
  locked[rank] = false;
  report();
  atomic { result = any || completed; any = false; completed = false }
}

inline report() {
  if
  :: completed -> RING_INBOX(rank)
  :: else
  fi
}

/* progress(), and sleep_until_moved() where that moves nothing: the same again, as the bell's condition, and the sleep. */
inline go_on(done) {
#ifndef MUTANT_LOOKS_FIRST
  if
  :: listens -> rung[me] = false
  :: else
  fi;
#endif
  progress();
#ifdef MUTANT_LOOKS_FIRST
  if
  :: listens -> rung[me] = false
  :: else
  fi;
#endif
  if
  :: atomic { result || (listens && (done)) -> listens = false }
  :: atomic { !result && !listens -> listens = true }
  :: !result && listens && !(done) -> atomic { rung[me] -> listens = false }
  fi
}

/* post(), with whatever makes it a receive or a send. */
inline post(tag) {
  LOCK(rank);
  atomic {
    if
    :: FAILED(rank) -> /* it throws */
       if
       :: rank == 1 -> send_broken = true
       :: rank == 0 -> complete[tag] = true; broken[tag] = true
       fi
    :: !FAILED(rank) && rank == 1 -> sends++
    :: !FAILED(rank) && rank == 0 && aside[tag] -> aside[tag] = false; complete[tag] = true; completed = true
    :: !FAILED(rank) && rank == 0 && !aside[tag] -> posted[tag] = true
    fi;
    locked[rank] = false
  };
  report();
  completed = false
}

inline run_message(tag, done) {
  post(tag);
  awaiting[rank] = true;
  do
  :: (done) -> break
  :: !(done) -> go_on(done)
  od;
  awaiting[rank] = false
}

inline submit(tag) {
  post(tag);
  progress();
  atomic { !locked[rank] -> work_asleep[rank] = false } /* notify_one() */
}

inline leave_and_stop() {
#ifdef MUTANT_STOPS_FIRST
  closing[rank] = true;
  left[rank] = true;
#else
  left[rank] = true;
  closing[rank] = true;
#endif
#ifndef MUTANT_SILENT_LEAVE
  atomic { RING_INBOX(0); RING_INBOX(1) };
#endif
  atomic {
    !locked[rank] ->
      stopping[rank] = true;
      work_asleep[rank] = false;
      if
      :: IS_PENDING -> fail_all(rank)
      :: else
      fi
  };
  report();
  second_ended[rank]
}

#if ASYNC > 0
proctype Second(byte rank) {
  byte me = SECOND(rank), n;
  bool any, completed, result, listens, gone, empty_ring;
  do
  :: LOCK(rank);
     if
     :: atomic { !IS_PENDING && !stopping[rank] -> work_asleep[rank] = true; locked[rank] = false };
        !work_asleep[rank]
     :: atomic { !IS_PENDING && stopping[rank] -> locked[rank] = false; break }
     :: atomic { IS_PENDING -> locked[rank] = false };
        /* await_lull(): it looks again every now and then, so whatever changes is seen. */
        !awaiting[rank] || stopping[rank] || !IS_PENDING;
        do
        :: atomic { awaiting[rank] -> listens = false; break }
#ifndef MUTANT_SLEEPS_IDLE
        :: go_on(!IS_PENDING || awaiting[rank]);
#else
        :: go_on(false);
#endif
           if
           :: listens
           :: else -> break
           fi
        od
     fi
  od;
  second_ended[rank] = true
}
#endif

proctype Receiver() {
  byte rank, me = FIRST(0), n, tag = 1;
  bool any, completed, result, listens, gone, empty_ring;
#if ASYNC & 1
  submit(0);
#endif
wait:
  run_message(tag, complete[tag]);
#ifndef QUITS
#if ASYNC & 1
  complete[0]; /* a wait for its work */
#else
  if
  :: atomic { tag == 1 && !broken[1] -> tag = 0 };
     goto wait
  :: else
  fi;
#endif
#endif
  leave_and_stop();
  ended[0] = true
}

proctype Sender() {
  byte rank = 1, me = FIRST(1), n;
  bool any, completed, result, listens, gone, empty_ring;
#ifdef GIVES_UP
  submit(0);
#elif ASYNC & 2
  submit(0);
#ifndef SHORT
  submit(0);
#endif
  !SENDING;
#else
again:
  run_message(0, !SENDING);
#ifndef SHORT
  if
  :: sends == 1 && !send_broken -> goto again
  :: else
  fi;
#endif
#endif
  leave_and_stop();
  ended[1] = true
}

init {
  atomic {
    if
    :: first_tag = 0
    :: first_tag = 1
    fi;
#if ASYNC & 1
    run Second(0);
#else
    second_ended[0] = true;
#endif
#if ASYNC & 2
    run Second(1);
#else
    second_ended[1] = true;
#endif
    run Receiver();
    run Sender()
  }
}

ltl every_thread_ends { <> (ended[0] && ended[1]) }
