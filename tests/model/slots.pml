/* Slots: two suffice. Nobody overwrites what another may still read, or reads what is not yet written.
 *
 * Models Channel::begin_operation() and own_payload() of src/comm/backends/shm/channel.{h,cpp} and the slot tiers of
 * all_reduce.cpp and movement.cpp; waiting, failure and death are channel.pml's. Every operation fills its slot,
 * announces itself, waits for the peers' announcements and reads all slots. A rank that throws ends: whatever it called
 * next would throw in check(), because a failed group stays failed (MUTANT_NO_CHECK calls on).
 *
 * A slot's content is the number of the operation that wrote it. Both directions of an error show: a reader that
 * comes too early finds an older number, and one that is overtaken a newer one.
 *
 * -DLEAVER: rank 0 ends after any number of operations, while the others go on.
 *
 * Checked: every read finds the operation's own data (assert); without -DCRASH and -DLEAVER no operation throws; every
 * rank ends in every run (ltl every_rank_ends).
 */
#ifndef RANKS
#define RANKS 2
#endif
#ifndef OPS
#define OPS 4
#endif
#ifdef MUTANT_ONE_SLOT
#define SLOTS 1
#else
#define SLOTS 2 /* kSlots */
#endif

#include "channel.pml"

byte seq[RANKS * SLOTS];        /* Slot::seq */
byte content[RANKS * SLOTS];    /* Slot::descriptor and Slot::payload */

#ifdef MUTANT_NO_CHECK
#define CHECK() skip
#else
#define CHECK() check()
#endif

#define SLOT(rank) ((rank) * SLOTS + s % SLOTS)

inline announce() {
  seq[SLOT(me)] = s;
#ifndef MUTANT_SILENT_ANNOUNCE
  RING(me)
#endif
}

proctype Rank(byte me) provided (LIVES) {
  byte s = 1, p, b;
next:
  do
#ifdef LEAVER
  :: me == 0 -> break
#endif
  :: atomic { s > OPS -> break }
  :: atomic { s <= OPS -> CHECK() };
#ifdef MUTANT_FLAG_FIRST
     announce();
     content[SLOT(me)] = s;
#else
     content[SLOT(me)] = s;
     announce();
#endif
     wait_all(seq[SLOT(p)] >= s);
     atomic {
       do
       :: p < RANKS -> assert(content[SLOT(p)] == s); p++
       :: else -> break
       od;
       p = 0;
       s++
     }
  od;
thrown:
#ifdef MUTANT_NO_CHECK
  if
  :: atomic { s < OPS -> p = 0; s++ };
     goto next
  :: else
  fi;
#endif
  atomic {
#if defined(CRASH) || defined(LEAVER)
    assert(s > OPS || aborted || me == 0); /* check() throws in every later operation, so the rank may as well end */
#else
    assert(s > OPS);
#endif
    s = 0;
    p = 0
  };
  leave()
}

init {
  byte b;
  atomic { start_everybody() }
}
