/* The rings of the shm transport: every message arrives once, whole and in order, and nobody sleeps through one.
 *
 * Models the ring of src/transport/shm/inbox.h (steps 1 to 4 and a to e) from one worker to another: reserve(),
 * publish(), announce(), send(), flush(), wait_below() of src/transport/shm/sending.cpp; poll(), drain(), look_around(),
 * lose() of receiving.cpp; sleep(), wake(), hush(), close() and the watch's callback of shm_transport.cpp. The threads
 * are:
 *
 *   Sender    sends MESSAGES messages of one or two cells, then waits in wait_below() until all are taken; with -DCLOSE
 *             it closes its end instead
 *   Flusher   polls in the sender's process: it writes what the ring had no room for
 *   Receiver  polls in the receiver's process: it delivers, BATCH records at a time
 *   Guest     with -DGUEST: a second thread of the receiver's process, which hushes the bell, polls, and lifts the hush
 *
 * With -DCRASH either process is killed at any step. The other's watch learns of it at any later moment.
 *
 * Memory. Every thread has a store buffer, as in bell.pml: what it stores reaches the memory later and in order, while
 * its loads do not wait. That holds of the unlocking of a mutex, too. A fence waits until the buffer is empty. An
 * exchange whose result is used acts on the memory itself. The cells of a record are written in one step, which is before
 * the code's own stores of them can arrive; `tail` comes later, so no run of a reader that comes too early is missing.
 * The buffers of a killed process empty before its watch learns of the death, because the kernel has changed threads.
 *
 * A bell does what bell.pml proves of one: to ring is a fence and the waking of all who sleep, in one step, and so is to
 * look at the condition after a fence and to fall asleep. A hushed bell wakes nobody.
 *
 * Left out: pieces that travel by reference, what the receiver checks of a record, messages that can wait and
 * announce_waiting(), the second bell, several peers, the other direction's messages, all time limits (also kNap: so
 * nothing can depend on them). Who closes looks for room from time to time; here it waits until there is some.
 *
 * Checked: each delivery is of the next message, whole (assert); nothing of what was published before a death, and
 * nothing at all before a close, is missing when the receiver says that its peer is lost (assert); every thread ends in
 * every run (ltl every_thread_ends: all messages are delivered and taken, or the peer is known to be lost).
 */
#ifndef MESSAGES
#define MESSAGES 3
#endif
#ifndef CAPACITY
#define CAPACITY 3
#endif
#ifndef LARGEST
#define LARGEST 2 /* cells of a record; the code's largest_record() is a quarter of the ring */
#endif
#ifndef BATCH
#define BATCH 1
#endif
#define NOBODY 255
#define SENDS 0 /* the processes */
#define RECEIVES 1
#define SENDER 0 /* the threads */
#define FLUSHER 1
#define RECEIVER 2
#define GUEST_THREAD 3

mtype = { TAIL, HEAD, TAKEN, READY, ROOM, WANTS, CLOSED, UNLOCKED };
chan buffer[4] = [4] of { mtype, byte };

/* In shared memory. */
byte tail, head, taken;      /* RingControl */
bool closed, wants_room;
bool ready, ready_of_sender; /* the bit of the one in the other's InboxHeader::ready */
byte size[CAPACITY];         /* at the first cell of a record: its cells; */
byte content[CAPACITY];      /* in each cell: the number of its message, or 0: a kSkip */

/* The kernel's: who sleeps on which bell. */
bool flusher_sleeps, receiver_sleeps;
byte hushed;
byte dead = NOBODY;

/* Of the sender's process. */
bool locked;                 /* Peer::mutex */
byte next;                   /* Peer::tail: where the next record begins */
chan outbox = [MESSAGES] of { byte, byte };
byte queued;                 /* records in the outbox */
bool lost, room_sleeps;
bool sender_around, sender_woken, sender_told, sender_ended;

/* Of the receiver's process. */
bool polling;                /* Executor::polling_ */
byte read;                   /* Peer::head */
byte delivered;
bool unread, around, woken, told, guest_ended;

#define FENCE(thread) empty(buffer[thread])
#define STORE(thread, what, value) buffer[thread] ! what, value

#define ARRIVES(thread)                                                                                         \
  atomic {                                                                                                      \
    buffer[thread] ? what, value ->                                                                             \
      if                                                                                                        \
      :: what == TAIL -> tail = value                                                                           \
      :: what == HEAD -> head = value                                                                           \
      :: what == TAKEN -> taken = value                                                                         \
      :: what == READY -> ready = true                                                                          \
      :: what == ROOM -> ready_of_sender = true                                                                 \
      :: what == WANTS -> wants_room = true                                                                     \
      :: what == CLOSED -> closed = true                                                                        \
      :: what == UNLOCKED -> locked = false                                                                     \
      fi;                                                                                                       \
      what = 0;                                                                                                 \
      value = 0                                                                                                 \
  }

proctype Memory() {
  mtype what;
  byte value;
end:
  do
  :: ARRIVES(SENDER)
  :: ARRIVES(FLUSHER)
  :: ARRIVES(RECEIVER)
#ifdef GUEST
  :: ARRIVES(GUEST_THREAD)
#endif
  od
}

#include "rings_sender.pml"

/* --- the receiver's process --- */

#define AT (read % CAPACITY)

inline deliver() {
  assert(content[AT] == delivered + 1);
  assert(size[AT] == 1 || content[(read + 1) % CAPACITY] == delivered + 1);
  assert(size[AT] < 3 || content[(read + 2) % CAPACITY] == delivered + 1);
  delivered++
}

inline lose() {
  assert(read == tail);
#ifdef CLOSE
  assert(dead == SENDS || delivered == MESSAGES);
#endif
  told = true
}

inline drain(to_the_end) {
#ifndef MUTANT_CLOSED_LATE
  saw_closed = closed;
#endif
  do
  :: atomic { tail == read || told || (n == BATCH && !to_the_end) -> n = 0; break }
  :: atomic { tail != read && !told && (n < BATCH || to_the_end) ->
#ifdef MUTANT_HEAD_FIRST
       STORE(me, HEAD, read + size[AT])
     };
     atomic {
#endif
       assert(size[AT] > 0);
       if
       :: content[AT] != 0 -> deliver(); STORE(me, TAKEN, delivered)
       :: else
       fi;
       read = read + size[AT];
#ifndef MUTANT_HEAD_FIRST
       STORE(me, HEAD, read);
#endif
       n = (to_the_end -> 0 : n + 1);
       any = true
     }
  od;
#ifdef MUTANT_CLOSED_LATE
  saw_empty = (tail == read);
  saw_closed = closed;
#endif
  if
  :: any ->
     any = false;
     if
#ifdef MUTANT_NO_READ_FENCE
     :: atomic { wants_room -> wants_room = false };
#else
     :: atomic { FENCE(me) && wants_room -> wants_room = false };
#endif
        STORE(me, ROOM, 0);
        atomic { FENCE(me) -> flusher_sleeps = false }
#ifdef MUTANT_NO_READ_FENCE
     :: !wants_room
#else
     :: FENCE(me) && !wants_room
#endif
     fi
  :: else
  fi;
#ifdef MUTANT_CLOSED_LATE
#define EMPTY saw_empty
#else
#define EMPTY (tail == read)
#endif
  if
#ifndef MUTANT_FORGETS_REST
  :: atomic { !EMPTY -> unread = !told; saw_closed = false }
#else
  :: atomic { !EMPTY -> saw_closed = false }
#endif
  :: atomic { EMPTY && saw_closed && !told -> saw_closed = false; lose() }
  :: atomic { EMPTY && (!saw_closed || told) -> saw_closed = false }
  fi
}

inline poll() {
  atomic { bits = unread; unread = false };
  if
#ifdef MUTANT_NO_POLL_FENCE
  :: atomic { ready && tail == read -> bits = false }; /* the look at `tail` comes first */
     ready = false
  :: atomic { ready && tail != read -> bits = true };
     ready = false
#else
  :: atomic { ready -> ready = false; bits = true };
     FENCE(me)
#endif
  :: !ready
  fi;
  if
  :: atomic { bits -> bits = false }; drain(false)
  :: else
  fi;
#ifdef CRASH
  if
  :: atomic { around -> around = false };
     drain(true);
     if
     :: atomic { !told -> lose() }
     :: told
     fi
  :: else
  fi
#endif
}

#define PENDING (around || unread || ready)
#define RECEIVED (told || (delivered == MESSAGES && !CLOSES))
#ifdef CLOSE
#define CLOSES true
#else
#define CLOSES false
#endif

proctype Receiver() provided (dead != RECEIVES) {
  byte me = RECEIVER, n;
  bool any, bits, saw_closed;
#ifdef MUTANT_CLOSED_LATE
  bool saw_empty;
#endif
end:
  do
  :: PENDING && !polling ->
     atomic { !polling -> polling = true };
     poll();
     polling = false
  :: atomic { FENCE(me) && !PENDING && !woken -> receiver_sleeps = true };
     !receiver_sleeps;
     woken = false;
     FENCE(me)
  :: atomic { woken -> woken = false }
  od
}

#ifdef GUEST
proctype Guest() provided (dead != RECEIVES) {
  byte me = GUEST_THREAD, n;
  bool any, bits, saw_closed;
#ifdef MUTANT_CLOSED_LATE
  bool saw_empty;
#endif
  atomic { FENCE(me) -> hushed++ };
  if
  :: atomic { !polling -> polling = true }; poll(); polling = false
  :: true
  fi;
  atomic { FENCE(me) -> hushed-- };
#ifndef MUTANT_HUSH_FORGETS
  if
  :: atomic { !polling -> polling = true }; poll(); polling = false
  :: polling
  fi;
  if
  :: atomic { FENCE(me) && PENDING -> woken = true; receiver_sleeps = false }
  :: FENCE(me) && !PENDING
  fi;
#endif
  guest_ended = true
}
#endif

#ifdef CRASH
proctype Killer() {
  if
  :: dead = SENDS
  :: dead = RECEIVES
  fi
}

proctype Watch() {
end:
  if
  :: dead == SENDS && FENCE(SENDER) && FENCE(FLUSHER) ->
     around = true;
#ifndef MUTANT_SILENT_DEATH
     atomic { woken = true; receiver_sleeps = false }
#endif
  :: dead == RECEIVES && FENCE(RECEIVER) ->
     sender_around = true;
     atomic { sender_woken = true; flusher_sleeps = false }
  fi
}
#endif

init {
  atomic {
    run Memory();
    run Sender();
    run Flusher();
    run Receiver();
#ifdef GUEST
    run Guest();
#else
    guest_ended = true;
#endif
#ifdef CRASH
    run Killer();
    run Watch()
#endif
  }
}

ltl every_thread_ends { <> ((sender_ended || dead == SENDS) && ((RECEIVED && guest_ended) || dead == RECEIVES)) }
