/* How messages.pml, which includes this file, moves messages through the ring: push() of the sender, pull() of the
 * receiver, and fail_all(). All of it with the rank's lock. */

inline fail_all(rank) {
  if
  :: rank == 0 ->
     if
     :: target != NONE -> complete[target] = true; broken[target] = true; target = NONE
     :: else
     fi;
     if
     :: posted[0] -> posted[0] = false; complete[0] = true; broken[0] = true
     :: else
     fi;
     if
     :: posted[1] -> posted[1] = false; complete[1] = true; broken[1] = true
     :: else
     fi;
     to_aside = NONE;
     header_read = false;
     data_read = 0
  :: rank == 1 -> send_broken = send_broken || SENDING; sent = sends
  fi;
  completed = true
}

#ifdef PIECES
#define A_PIECE_ENDS if :: break :: skip fi
#define A_TURN_ENDS :: atomic { any -> break }
#else
#define A_PIECE_ENDS skip
#define A_TURN_ENDS
#endif

/* Rank 1. */
inline push() {
#ifdef REFERENCE
  do
  :: atomic { SENDING && moved == 0 && written - read < RING ->
       cell[written % RING] = EXPECTED(sent, 0);
       written++;
       moved = 1;
       any = true
     };
     RING_INBOX(0)
  :: atomic { SENDING && moved == 1 && copied > sent -> moved = 0; sent++; any = true; completed = true }
  :: atomic { !SENDING || (moved == 0 && written - read == RING) || (moved == 1 && copied <= sent) -> break }
  od
#else
  do
  :: atomic { SENDING && written - read < RING ->
#ifdef MUTANT_COUNTER_FIRST
       n = (CELLS - moved < RING - (written - read) -> CELLS - moved : RING - (written - read));
       written = written + n
     };
     atomic {
       written = written - n;
#endif
       do
       :: moved < CELLS && written - read < RING ->
          cell[written % RING] = EXPECTED(sent, moved);
          written++;
          moved++;
          A_PIECE_ENDS
       :: else -> break
       od;
       n = 0;
       any = true;
       if
       :: moved == CELLS -> moved = 0; sent++; completed = true
       :: else
       fi
     };
     RING_INBOX(0)
  :: atomic { !SENDING || written - read == RING -> break }
  A_TURN_ENDS
  od
#endif
}

/* Rank 0. One turn of the loop: what is there of the header and the data; then the ring. */
inline take_cell(expected) {
  assert(cell[read % RING] == expected);
  read++
}

inline finish() {
  header_read = false;
  data_read = 0;
  if
  :: target != NONE -> complete[target] = true; target = NONE; completed = true
  :: to_aside != NONE && posted[to_aside] -> /* a receive for it has come meanwhile */
     posted[to_aside] = false;
     complete[to_aside] = true;
     to_aside = NONE;
     completed = true
  :: to_aside != NONE && !posted[to_aside] -> aside[to_aside] = true; to_aside = NONE
  fi
}

inline pull() {
#ifdef REFERENCE
  do
  :: atomic { RECEIVING && written != read && !header_read ->
       header = cell[read % RING] - HEADER;
       assert(header < 2);
       read++;
       header_read = true;
       any = true;
       if
       :: posted[header] -> posted[header] = false; target = header
       :: else -> to_aside = header
       fi
     };
     RING_INBOX(1)
  :: atomic { RECEIVING && header_read && data_read < DATA -> torn = torn || sent > copied; data_read++; any = true }
  :: RECEIVING && header_read && data_read == DATA ->
#ifndef MUTANT_NO_LOOK
#ifdef MUTANT_FAILURE_UNSEEN
     gone = false;
#else
     gone = FAILED(rank);
#endif
     atomic {
#ifndef MUTANT_LEAVING_UNSEEN
       gone = gone || left[1];
#endif
       if
       :: gone -> gone = false; break
       :: else
       fi
     };
#endif
     assert(!torn);
#ifndef MUTANT_COMPLETE_FIRST
     copied++;
     RING_INBOX(1);
#endif
     atomic { finish(); header = 0; any = true }
#ifdef MUTANT_COMPLETE_FIRST
     ; copied++;
     RING_INBOX(1)
#endif
  :: atomic { !RECEIVING || (!header_read && written == read) -> break }
  od
#else
  do
  :: atomic { RECEIVING && written != read ->
       any = true;
       if
       :: !header_read ->
          header = cell[read % RING] - HEADER;
          assert(header < 2);
          read++;
          header_read = true;
          if
          :: posted[header] -> posted[header] = false; target = header
          :: else -> to_aside = header
          fi
       :: else
       fi;
       do
       :: written != read && data_read < DATA -> take_cell(header + 1); data_read++; A_PIECE_ENDS
       :: else -> break
       od;
       if
       :: data_read == DATA -> finish(); header = 0
       :: else
       fi
     };
#ifndef MUTANT_SILENT_READ
     RING_INBOX(1)
#endif
  :: atomic { !RECEIVING || written == read -> break }
  A_TURN_ENDS
  od
#endif
}
