/* Posted receives: a sender writes a message to the tensor of the receive that waits for it, and to no other memory.
 *
 * Models RingControl::posted (src/comm/backends/shm/layout.h) between two ranks: posted_place(), write_to_posted(), push(),
 * post_receive(), read_line(), match(), take_receive(), copy_reference(), copy_from_ring(), deliver() and match_aside()
 * of message_rings.cpp, post() and fail_all() of messages.cpp. Nobody sleeps here (messages.pml), and the ring has room
 * for all messages, as it has where a receive is posted.
 *
 * The sender sends MESSAGES messages of DATA cells with tags 0 and 1 in any order, each to the posted receive, through
 * the ring or, with -DREFERENCE, by reference; then both ranks copy (copy_claimed(), say_target(), help()). The receiver posts RECEIVES receives with tags in any order at any moments;
 * so some receives are posted before their message comes and some after, and a message may come for which there is none
 * yet. With -DFAILS the group fails at any moment on the receiver; the sender looks for it only between its turns.
 *
 * Each rank has its lock, so a step of one may come between two of the other only where it touches shared memory.
 *
 * Checked: the nth receive with a tag gets the nth message with that tag, whole; a tensor is only written to while its
 * receive waits or, after a failure, if that receive says that it was posted (assert).
 */
#ifndef MESSAGES
#define MESSAGES 3
#endif
#ifndef RECEIVES
#define RECEIVES 3
#endif
#ifndef DATA
#define DATA 2
#endif
#define CELLS (DATA + 1)
#define NONE 255
/* A line: the message's number, and how it comes. */
#define LINE(message, way) (3 * (message) + (way) + 1)
#define RINGWAY 0
#define BY_REFERENCE 1
#define IN_PLACE 2

/* In shared memory. */
byte ring[MESSAGES * CELLS];
byte written;
byte copied;
byte claimed, copied_by_sender;           /* of the message by reference that is under way: cells */
byte target_of, target_place;             /* a message's number plus 1; 0: none */
byte posted_at, posted_tag, posted_place; /* PostedReceive; 0: none */
byte tensor[RECEIVES * DATA];             /* of the receives, on the receiver's heap */
bool failed;

/* Of the ranks. */
byte message_tag[MESSAGES], receive_tag[RECEIVES];
byte sent, moved;
bool waits[RECEIVES], complete[RECEIVES], was_posted[RECEIVES], is_aside[MESSAGES];
byte receives;                            /* how many there were */
byte read, referenced;

inline write_cell(to, at, message) {
  assert(waits[to] || (failed && was_posted[to]));
  tensor[(to) * DATA + (at)] = (message) + 1
}

/* Its index among the messages or receives with its tag; so a message's must be its receive's. */
inline check_whole(receive) {
  index = 0;
  i = 0;
  do
  :: i < receive -> index = index + (receive_tag[i] == receive_tag[receive] -> 1 : 0); i++
  :: else -> break
  od;
  i = 0;
  do
  :: i < MESSAGES && message_tag[i] == receive_tag[receive] && index == 0 -> break
  :: i < MESSAGES && message_tag[i] == receive_tag[receive] && index > 0 -> index--; i++
  :: i < MESSAGES && message_tag[i] != receive_tag[receive] -> i++
  od;
  index = 0;
  do
  :: index < DATA -> assert(tensor[(receive) * DATA + index] == i + 1); index++
  :: else -> break
  od;
  index = 0;
  i = 0
}

#ifdef MUTANT_NO_POSITION
#define IS_POSTED (posted_at != 0 && posted_tag == message_tag[sent])
#elif defined(MUTANT_NO_TAG)
#define IS_POSTED (posted_at == written + 1)
#else
#define IS_POSTED (posted_at == written + 1 && posted_tag == message_tag[sent])
#endif

proctype Sender() {
  byte place = NONE;
  do
  :: atomic { sent == MESSAGES || failed -> break }
  :: atomic { sent < MESSAGES && !failed && IS_POSTED -> moved = 0 };
     do
     :: moved < DATA -> atomic { write_cell(posted_place, moved, sent); moved++ }
     :: moved == DATA -> break
     :: atomic { failed -> goto gone } /* between two turns */
     od;
     atomic { ring[written] = LINE(sent, IN_PLACE); written++; sent++; moved = 0 }
  :: atomic { sent < MESSAGES && !failed -> ring[written] = LINE(sent, RINGWAY); written++; moved = 0 };
     do
     :: atomic { moved < DATA -> ring[written] = sent + 1; written++; moved++ }
     :: atomic { moved == DATA -> sent++; moved = 0; break }
     od
#ifdef REFERENCE
  :: atomic { sent < MESSAGES && !failed ->
       if
       :: IS_POSTED -> place = posted_place
       :: true -> place = NONE /* or it looked before that */
       fi;
       moved = 0
     };
#ifdef MUTANT_CLAIMED_LATE
     atomic { ring[written] = LINE(sent, BY_REFERENCE); written++ };
     atomic { claimed = 0; copied_by_sender = 0 };
#else
     atomic { claimed = 0; copied_by_sender = 0 };
     atomic { ring[written] = LINE(sent, BY_REFERENCE); written++ };
#endif
     do
     :: atomic { copied >= sent + 1 -> sent++; moved = 0; place = NONE; break }
     :: atomic { place == NONE && target_of == sent + 1 -> place = target_place }
     :: atomic { place != NONE && claimed < DATA -> claimed++ }; /* the last ones */
        atomic { write_cell(place, DATA - 1 - moved, sent); moved++ };
        copied_by_sender++
     :: atomic { failed -> goto gone }
     od
#endif
  od;
gone:
  skip
}

/* The oldest receive that waits, if nothing has begun to come. */
inline post_receive() {
  i = 0;
#ifdef MUTANT_YOUNGEST
  oldest = NONE;
  do
  :: i < receives -> oldest = (waits[i] -> i : oldest); i++
  :: else -> break
  od;
#else
  do
  :: i < receives && waits[i] -> oldest = i; break
  :: i < receives && !waits[i] -> i++
  :: i == receives -> oldest = NONE; break
  od;
#endif
  i = 0
}
#ifdef MUTANT_POSTS_AMID
#define MAY_POST (oldest != NONE)
#else
#define MAY_POST (oldest != NONE && message == NONE)
#endif

/* Not one step: the sender may look in between. */
inline publish() {
  if
#ifdef MUTANT_YOUNGEST
  :: MAY_POST ->
#else
  :: MAY_POST && posted_at != read + 1 ->
#endif
#ifdef MUTANT_POSITION_FIRST
     atomic { posted_at = read + 1; was_posted[oldest] = true };
     posted_place = oldest;
     posted_tag = receive_tag[oldest]
#else
     posted_place = oldest;
     posted_tag = receive_tag[oldest];
     atomic { posted_at = read + 1; was_posted[oldest] = true }
#endif
  :: else
  fi;
  oldest = NONE
}

/* The first receive that waits with this tag, or NONE. */
inline take_receive(tag) {
  i = 0;
  do
  :: i < receives && waits[i] && receive_tag[i] == tag -> target = i; break
  :: i < receives && !(waits[i] && receive_tag[i] == tag) -> i++
  :: i == receives -> target = NONE; break
  od;
  i = 0
}

/* `receive` gets a message that was put aside whole. */
inline from_aside(receive, whole) {
  i = 0;
  do
  :: i < DATA -> write_cell(receive, i, whole); i++
  :: else -> break
  od;
  is_aside[whole] = false;
  waits[receive] = false;
  complete[receive] = true;
  check_whole(receive)
}

proctype Receiver() {
  byte i, index, oldest = NONE, message = NONE, way, target = NONE, found = NONE, data_read;
  do
  /* post(): with the lock. A message of its tag that is being put aside is not whole. */
  :: atomic { receives < RECEIVES ->
       waits[receives] = true;
       receives++;
       do
       :: i < MESSAGES && is_aside[i] && message_tag[i] == receive_tag[receives - 1] -> found = i; break
       :: i < MESSAGES && !(is_aside[i] && message_tag[i] == receive_tag[receives - 1]) -> i++
       :: i == MESSAGES -> break
       od;
       i = 0;
       if
       :: found != NONE -> from_aside(receives - 1, found); found = NONE
       :: else
       fi;
       post_receive()
     };
     publish()
  /* pull(): the line, */
  :: atomic { message == NONE && written > read ->
       message = (ring[read] - 1) / 3;
       way = (ring[read] - 1) % 3;
       read++;
       take_receive(message_tag[message]);
       if
       :: way == IN_PLACE -> assert(target != NONE && was_posted[target])
       :: else
       fi;
       data_read = (way == IN_PLACE -> DATA : 0)
     };
     if
     :: atomic { way == BY_REFERENCE && target != NONE ->
#ifndef MUTANT_NOT_SAID
          was_posted[target] = true;
#endif
          target_place = target };
        target_of = message + 1
     :: way != BY_REFERENCE || target == NONE
     fi
  /* the data, */
  :: atomic { message != NONE && data_read < DATA && way == RINGWAY && written > read ->
       if
       :: target != NONE -> write_cell(target, data_read, message)
       :: else
       fi;
       assert(ring[read] == message + 1);
       read++;
       data_read++
     }
  :: atomic { message != NONE && way == BY_REFERENCE && claimed < DATA -> claimed++ }; /* the first ones */
     atomic {
       if
       :: target != NONE -> write_cell(target, data_read, message)
       :: else
       fi;
       data_read++
     }
  /* and deliver(). */
  :: message != NONE && (way == BY_REFERENCE -> data_read + copied_by_sender == DATA : data_read == DATA) ->
     if
     :: way == BY_REFERENCE -> copied = message + 1
     :: else
     fi;
     atomic {
       data_read = 0;
       if
       :: target != NONE -> waits[target] = false; complete[target] = true; check_whole(target)
       :: else -> /* a receive for it may have come meanwhile */
          take_receive(message_tag[message]);
          is_aside[message] = true;
          if
          :: target != NONE -> from_aside(target, message)
          :: else
          fi
       fi;
       target = NONE;
       message = NONE;
       way = 0;
       post_receive()
     };
     publish()
#ifdef FAILS
  :: atomic { failed = true;
       do
       :: i < RECEIVES -> waits[i] = false; i++
       :: else -> break
       od;
       i = 0;
       break
     }
#endif
  :: atomic { receives == RECEIVES && read == written && sent == MESSAGES && message == NONE -> break }
  od
}

init {
  atomic {
    byte k;
    do
    :: k < MESSAGES -> message_tag[k] = 0; k++
    :: k < MESSAGES -> message_tag[k] = 1; k++
    :: k == MESSAGES -> break
    od;
    k = 0;
    do
    :: k < RECEIVES -> receive_tag[k] = 0; k++
    :: k < RECEIVES -> receive_tag[k] = 1; k++
    :: k == RECEIVES -> break
    od;
    run Sender();
    run Receiver()
  }
}
