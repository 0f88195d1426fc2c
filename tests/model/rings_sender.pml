/* The sender's process of rings.pml, which includes this file: the threads Sender and Flusher. */

#define LOCK() atomic { !locked -> locked = true }
#define UNLOCK() STORE(me, UNLOCKED, 0)
#define RING_RECEIVER() atomic { FENCE(me) -> receiver_sleeps = receiver_sleeps && hushed > 0 }

#define TO_END (CAPACITY - next % CAPACITY)
#define SKIP(cells) (TO_END < (cells) -> TO_END : 0)
#define HAS_ROOM(cells) (next + SKIP(cells) + (cells) - head <= CAPACITY)

inline fill(at, message, cells) {
  size[(at) % CAPACITY] = cells;
  content[(at) % CAPACITY] = message;
  if
  :: cells > 1 -> content[((at) + 1) % CAPACITY] = message
  :: else
  fi;
  if
  :: cells > 2 -> content[((at) + 2) % CAPACITY] = message
  :: else
  fi
}

/* reserve(), which has found room, the copy, publish(): a step up to the store, which nobody sees yet. */
inline write(message, cells) {
  if
  :: SKIP(cells) > 0 ->
     size[next % CAPACITY] = SKIP(cells);
     content[next % CAPACITY] = 0;
     next = next + SKIP(cells)
  :: else
  fi;
#ifdef MUTANT_TAIL_FIRST
  next = next + cells;
  STORE(me, TAIL, next)
#else
  fill(next, message, cells);
  next = next + cells;
  STORE(me, TAIL, next)
#endif
}

inline announce() {
#ifdef MUTANT_NO_SEND_FENCE
  if
  :: atomic { !ready -> STORE(me, READY, 0) }
  :: ready
  fi;
#else
  if
  :: atomic { FENCE(me) && !ready -> STORE(me, READY, 0) }
  :: FENCE(me) && ready
  fi;
#endif
  RING_RECEIVER()
}

/* With the lock. */
inline flush() {
  do
  :: queued == 0 -> break
  :: queued > 0 ->
     outbox ? <message, cells>;
     if
     :: atomic { HAS_ROOM(cells) -> outbox ? message, cells; queued--; write(message, cells); wrote = true }
     :: atomic { !HAS_ROOM(cells) -> STORE(me, WANTS, 0) };
#ifdef MUTANT_NO_LAST_LOOK
        break
#else
        if
#ifdef MUTANT_NO_WANTS_FENCE
        :: atomic { HAS_ROOM(cells) ->
#else
        :: atomic { FENCE(me) && HAS_ROOM(cells) ->
#endif
             outbox ? message, cells; queued--; write(message, cells); wrote = true }
#ifdef MUTANT_NO_WANTS_FENCE
        :: !HAS_ROOM(cells) -> break
#else
        :: FENCE(me) && !HAS_ROOM(cells) -> break
#endif
        fi
#endif
     fi
  od;
  atomic { message = 0; cells = 0 };
  if
  :: wrote -> announce(); atomic { wrote = false; told_peer = true }
  :: else
  fi
}

inline choose_cells() {
  if
  :: cells = 1
  :: cells = LARGEST
  fi
}

inline send() {
  choose_cells();
  LOCK();
  if
  :: lost -> UNLOCK(); goto over
  :: !lost && queued == 0 && HAS_ROOM(cells) ->
     atomic { write(i, cells) };
#ifdef MUTANT_TAIL_FIRST
     atomic { fill(next - cells, i, cells) };
#endif
     cells = 0;
     UNLOCK();
     announce()
  :: else ->
     atomic { outbox ! i, cells; queued++; cells = 0 };
     flush();
     UNLOCK();
     if
     :: atomic { told_peer -> told_peer = false }
     :: !told_peer -> RING_RECEIVER() /* of the records before it may nobody have heard */
     fi
  fi
}

#define BELOW (lost || taken == MESSAGES)

proctype Sender() provided (dead != SENDS) {
  byte me = SENDER, i = 1, message, cells, seen;
  bool wrote, told_peer;
  do
  :: i <= MESSAGES -> send(); i++
  :: i > MESSAGES -> break
  od;
#ifdef CLOSE
#ifdef MUTANT_CLOSE_FIRST
  STORE(me, CLOSED, 0);
#endif
  do
  :: LOCK();
     seen = head;
     flush();
     if
     :: queued == 0 -> seen = 0; break
     :: else -> UNLOCK(); queued == 0 || head != seen
     fi
  od;
  lost = true;
  STORE(me, CLOSED, 0);
  announce();
  UNLOCK();
#else
  LOCK();
  do
  :: BELOW -> break
  :: !BELOW ->
#ifndef MUTANT_WAIT_UNSAID
     STORE(me, WANTS, 0);
#endif
     if
     :: FENCE(me) && BELOW -> break
     :: atomic { FENCE(me) && !BELOW -> room_sleeps = true; locked = false };
        atomic { !room_sleeps && !locked -> locked = true }
     fi
  od;
  UNLOCK();
#endif
over:
  atomic { cells = 0; i = 0; told_peer = false; sender_ended = true }
}

proctype Flusher() provided (dead != SENDS) {
  byte me = FLUSHER, message, cells;
  bool wrote, told_peer;
end:
  do
  :: atomic { ready_of_sender -> ready_of_sender = false };
     FENCE(me);
     LOCK();
     flush();
     atomic { told_peer = false; room_sleeps = false }; /* notify_all() */
     UNLOCK()
#ifdef CRASH
  :: atomic { sender_around -> sender_around = false }; /* look_around(), lose() */
     LOCK();
     atomic {
       lost = true;
       do
       :: queued > 0 -> outbox ? message, cells; queued--
       :: else -> break
       od;
       message = 0;
       cells = 0;
       room_sleeps = false
     };
     UNLOCK()
#endif
  :: atomic { FENCE(me) && !ready_of_sender && !sender_around && !sender_woken -> flusher_sleeps = true };
     !flusher_sleeps;
     sender_woken = false
  :: atomic { sender_woken && !ready_of_sender && !sender_around -> sender_woken = false }
  od
}
