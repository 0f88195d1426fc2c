/* A group's failure: who reports it, and what all ranks read of it.
 *
 * Models Channel::fail() and Channel::throw_failure() of src/comm/backends/shm/channel.cpp. Each rank has two threads,
 * its own and the watch's, and both may find a failure, each a different one. A rank writes its text (what failed, and
 * why) into its own block, and then tries to put its number into the abort word; the first one does. Everybody reads
 * the number and then the text of that rank. With -DCRASH any one rank is killed at any step, also between the two.
 *
 * Memory is in order: the text is written before the word with release, and read after it with acquire.
 *
 * Left out: what wakes the ranks (channel.pml), a text that is too long.
 *
 * Checked: whoever throws reads a whole text, and everybody the same one, at any time. Every thread ends in every run.
 */
#ifndef RANKS
#define RANKS 2
#endif
#define NOBODY 255
#define THREADS (2 * RANKS)
#define RANK_OF(thread) ((thread) / 2)
#define HALF 254 /* of a text is written */

byte word = NOBODY;     /* GroupHeader::abort: the reporter */
byte texts[RANKS] = 0;  /* RankControl::failure: 1 + the thread that found what it says; 0: nothing */
bool reported[RANKS];   /* Channel::reported_ */
bool locked[RANKS];     /* Channel::failure_mutex_ */
byte read = 0;          /* what the first one that threw has read */
byte dead = NOBODY;
byte ended;             /* threads, a bit each */
#define LIVES (RANK_OF(me) != dead)

inline write_text() {
  texts[RANK_OF(me)] = HALF;
  texts[RANK_OF(me)] = me + 1
}

inline name_rank() {
  atomic {
    if
#ifdef MUTANT_LAST_WINS
    :: true -> word = RANK_OF(me)
#else
    :: word == NOBODY -> word = RANK_OF(me)
    :: else
#endif
    fi
  }
}

inline fail() {
#ifndef MUTANT_NO_LOCK
  atomic { !locked[RANK_OF(me)] -> locked[RANK_OF(me)] = true };
#endif
  if
#ifdef MUTANT_REPORTS_AGAIN
  :: true ->
#else
  :: !reported[RANK_OF(me)] ->
#endif
     reported[RANK_OF(me)] = true;
#ifdef MUTANT_WORD_FIRST
     name_rank();
     write_text()
#else
     write_text();
     name_rank()
#endif
  :: else
  fi;
#ifndef MUTANT_NO_LOCK
  locked[RANK_OF(me)] = false
#endif
}

inline throw_failure() {
  reporter = word;
  assert(reporter != NOBODY);
  atomic {
    text = texts[reporter];
    assert(text != 0 && text != HALF);
    assert(read == 0 || read == text);
    read = text
  }
}

proctype Thread(byte me) {
  byte reporter, text;
  {
    if
    :: fail()                  /* finds a failure: a peer's death, a timeout, ranks that disagree */
    :: word != NOBODY -> skip  /* or is told of one */
    fi;
    throw_failure();
    throw_failure()            /* every later operation */
  } unless { !LIVES };
  ended = ended | (1 << me)
}

#ifdef CRASH
proctype Killer() {
  if
  :: dead = 0
  :: dead = RANKS - 1
  fi
}
#endif

init {
  byte thread;
  atomic {
    do
    :: thread < THREADS -> run Thread(thread); thread++
    :: else -> break
    od;
#ifdef CRASH
    run Killer()
#endif
  }
}

ltl every_thread_ends { <> (ended == (1 << THREADS) - 1) }
