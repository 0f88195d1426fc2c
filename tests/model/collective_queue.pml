/* The queue: one job at a time, each exactly once and in order; nobody who waits for the queue is forgotten.
 *
 * Models class CollectiveQueue of src/comm/kit/collective_queue.{h,cpp}, function by function; the job of QueuedBackend::enqueue() in
 * src/comm/kit/queued_backend.cpp; and end(), mark_future(), getFuture() and wait() of src/comm/kit/operation_work.cpp. The
 * threads of one rank are:
 *
 *   Submitter  submits works 0 … WORKS - 1. Then it drives the queue until the last of them is done, or does not drive (a
 *              wait with a limit), and waits until the works are complete
 *   Progress   the queue's own threads, made as CollectiveQueue makes them
 *   Waiter     with -DWAIT: drives the queue until work 0 is done. It has a deadline, which passes at any moment or never
 *   Runner     with -DRUNS=n: calls run() n times. It takes a free queue without the lock, or waits for its turn
 *   Asker      with -DFUTURE: asks for the future of work 0 at any moment
 *   Stopper    with -DSTOP: calls stop() at any moment, while all others go on
 *
 * A future's callback runs on the thread that marks it. It calls run(), or does not, and waits for the last work without
 * driving. So a queue that has no thread left while a callback runs shows as a thread that never ends. (A process of its
 * own stands for the callback. The thread that calls it does nothing until it has ended.)
 *
 * Steps. What a thread does under the queue's lock is one step for each access to `state`, because only try_take() and
 * give_back() look at anything of the queue without the lock, and they look at `state` alone. All accesses to `state`
 * are atomic accesses to one word, whose order all threads agree on; all else is guarded by a lock. So memory is in
 * order here.
 *
 * Left out: what a job does, and that it may fail; the time limit of OperationWork::wait() (the waits without driving
 * have none here, so nothing can depend on it); a run() that takes its job back, under the lock, because its turn has
 * not come long after its deadline; wake-ups without a cause; threads that cannot be started; the lifetime
 * of the objects.
 *
 * Checked: one job runs at a time, each is started once and completed once, and those queued start in the order of
 * submit() (assert); a queue is not taken past a queued job (assert); a future is marked once (assert); when all is done
 * nothing is queued, nobody is counted as waiting and, unless it has been stopped, the queue can be taken without the
 * lock (assert); every thread ends in every run, every work completes and every future is marked (ltl all_is_done).
 */
#ifndef WORKS
#define WORKS 2
#endif
#ifndef RUNS
#define RUNS 0
#endif
#define LAST (WORKS - 1)
#define BUSY 1
#define WANTED 2
#define BIT(thread) (1 << (thread))
#define MAX_PROGRESS 4

/* Who sleeps on `turn`, and who runs; progress threads count separately, on `wake`. */
#define SUBMITTER 0
#define WAITER 1
#define RUNNER 2
#define STOPPER 3
#define CALLBACK 4
#define FIRST_RUN WORKS /* of the jobs: those of run(), by thread */
#define JOBS (WORKS + 5)
#define ALL 31          /* threads that have ended; those that a run has not count as ended */

byte state;
bool locked;                             /* CollectiveQueue::mutex_ */
byte waiters, free_threads, asleep_turn, asleep_wake;
bool stopping;                           /* CollectiveQueue::stop_ */
chan jobs = [WORKS + 3] of { byte };
byte queued;                             /* how many these are */
byte threads, ended_threads;             /* ever started; a bit for each that has ended */

bool running;
byte started[JOBS];                      /* how often */
bool finished[JOBS];                     /* `finished` of run_in_turn(); completed_ and done_ of a work */
byte next_work;                          /* the first that has not started */
bool future, marked, callback_ended;     /* of work 0 */
bool passed;                             /* the Waiter's deadline */
byte ended;
bool over;

#define IS_BUSY (state & BUSY)
#define UNLOCK() locked = false
#define LOCK() !locked -> locked = true

inline notify_wake_one() {
  if
  :: asleep_wake & 1 -> asleep_wake = asleep_wake & ~1
  :: asleep_wake & 2 -> asleep_wake = asleep_wake & ~2
  :: asleep_wake & 4 -> asleep_wake = asleep_wake & ~4
  :: asleep_wake & 8 -> asleep_wake = asleep_wake & ~8
  :: asleep_wake == 0
  fi
}

/* The next are parts of a step: with the lock. */

inline release() {
  state = (waiters > 0 || queued > 0 -> WANTED : 0);
  if
  :: waiters > 0 -> asleep_turn = 0
  :: else
  fi;
  if
  :: stopping -> asleep_wake = 0
#ifdef MUTANT_WAITERS_ONLY
  :: !stopping && queued > 0 && waiters == 0 -> notify_wake_one()
#else
  :: !stopping && queued > 0 -> notify_wake_one()
#endif
  :: else
  fi
}

inline have_free_thread() {
  if
  :: free_threads == 0 ->
     assert(threads < MAX_PROGRESS);
     run Progress(threads);
     threads++;
     free_threads++
  :: else
  fi
}

inline submit(job) {
  atomic {
    LOCK();
    have_free_thread();
    jobs ! job;
    queued++;
#ifndef MUTANT_SUBMIT_UNWANTED
    state = state | WANTED;
#endif
    notify_wake_one();
    UNLOCK()
  }
}

inline begins() {
  assert(!running);
  running = true;
  assert(started[job] == 0);
  started[job]++;
  if
  :: job < WORKS -> assert(job == next_work); next_work++
  :: else
  fi
}

/* OperationWork::mark_future(), on the thread that runs `after`, or that has asked for the future. */
inline mark_future() {
  if
  :: atomic { future && finished[0] && !marked ->
#ifndef MUTANT_MARK_TWICE
       marked = true;
#endif
       run Callback()
     };
     callback_ended
  :: else
  fi
}

/* CollectiveQueue::run_first(), with the lock at its beginning and its end. */
inline run_first(by_waiter) {
  atomic {
    jobs ? job;
    queued--;
    assert(state == WANTED); /* "it is wanted, so nobody else could" */
#ifndef MUTANT_NOT_TAKEN
    state = state | BUSY;
#endif
    UNLOCK()
  };
  atomic { begins() };
  if
  :: job >= WORKS -> atomic { LOCK(); finished[job] = true; UNLOCK(); running = false } /* run_in_turn() */
  :: job < WORKS ->                                                                     /* OperationWork::end() */
#ifdef MUTANT_FUTURE_EARLY
     more = (job == 0 && future);
#endif
     atomic { assert(!finished[job]); finished[job] = true };
     atomic {
#ifndef MUTANT_FUTURE_EARLY
       more = (job == 0 && future);
#endif
       running = false
     }
  fi;
  atomic { LOCK(); release() };
  if
  :: atomic { !more -> UNLOCK() };
     atomic { LOCK(); job = 0 }
  :: atomic { more ->
       if
       :: !by_waiter ->
          free_threads--;
#ifndef MUTANT_NO_SPARE
          if
          :: queued > 0 -> have_free_thread()
          :: else
          fi
#endif
       :: else
       fi;
       UNLOCK()
     };
     mark_future();
     atomic {
       LOCK();
       if
       :: !by_waiter -> free_threads++
       :: else
       fi;
       more = false;
       job = 0
     }
  fi
}

#define WOKEN(me) (!(asleep_turn & BIT(me)) || (me == WAITER && passed))

/* CollectiveQueue::await_turn(), with the lock. */
inline await_turn() {
#ifdef MUTANT_NO_WANT
  waiters++;
#else
#ifdef MUTANT_WANT_LATE
  waiters++;
#else
  atomic { waiters++; state = state | WANTED };
#endif
#endif
  if
  :: atomic { IS_BUSY -> asleep_turn = asleep_turn | BIT(me)
#ifndef MUTANT_WANT_LATE
       ; UNLOCK()
#endif
     };
#ifdef MUTANT_WANT_LATE
     atomic { state = state | WANTED; UNLOCK() };
#endif
     atomic {
       WOKEN(me) && !locked ->
         locked = true;
#ifdef MUTANT_STILL_COUNTED
         waiters = waiters - (asleep_turn & BIT(me) -> 0 : 1);
#else
         waiters--;
#endif
         asleep_turn = asleep_turn & ~BIT(me)
     }
  :: atomic { !IS_BUSY -> waiters-- }
  fi
}

/* CollectiveQueue::drive() until finished[wanted]. */
inline drive(wanted) {
  atomic { LOCK() };
  do
  :: atomic { finished[wanted] -> break }
  :: atomic { !finished[wanted] && IS_BUSY ->
       if
       :: me == WAITER && passed -> break
       :: else
       fi
     };
     await_turn()
  :: atomic { !finished[wanted] && !IS_BUSY && queued > 0 }; run_first(true)
  :: atomic { !finished[wanted] && !IS_BUSY && queued == 0 -> break }
  od;
  atomic {
    if
#ifdef MUTANT_WAITERS_ONLY
    :: state == WANTED && waiters == 0 && queued == 0 -> state = 0
#else
#ifndef MUTANT_LEFT_WANTED
    :: state == WANTED -> release()
#endif
#endif
    :: else
    fi;
    UNLOCK()
  }
}

/* CollectiveQueue::run(), with the job FIRST_RUN + me. */
inline run_job() {
  if
  :: atomic { state == 0 -> state = BUSY; assert(queued == 0); job = FIRST_RUN + me; begins() };
     atomic { finished[job] = true; running = false; job = 0 };
     /* give_back() */
#ifdef MUTANT_BLIND_GIVE_BACK
     state = 0
#else
     if
     :: atomic { state == BUSY -> state = 0 }
     :: atomic { state != BUSY -> assert(state == (BUSY | WANTED)) };
        atomic { LOCK(); release(); UNLOCK() }
     fi
#endif
  :: state != 0 ->
     submit(FIRST_RUN + me);
     drive(FIRST_RUN + me);
     assert(finished[FIRST_RUN + me])
  fi
}

#ifndef MUTANT_STOP_UNWANTED
#define SLEEPS ((IS_BUSY && (!stopping || (state & WANTED))) || (queued == 0 && !stopping))
#else
#define SLEEPS (IS_BUSY || (queued == 0 && !stopping))
#endif

proctype Progress(byte me) {
  byte job;
  bool more;
  atomic { LOCK() };
  do
#ifndef MUTANT_STOP_UNWANTED
  :: atomic { stopping && !(state & WANTED) -> state = state | WANTED }
#endif
  :: atomic { !IS_BUSY && queued > 0 }; run_first(false)
  :: atomic { !IS_BUSY && queued == 0 && stopping -> break }
  :: atomic { SLEEPS -> asleep_wake = asleep_wake | BIT(me); UNLOCK() };
     atomic { !(asleep_wake & BIT(me)) && !locked -> locked = true }
  od;
  atomic {
    free_threads--;
    ended_threads = ended_threads | BIT(me);
    if
    :: state == WANTED -> release()
    :: else
    fi;
    UNLOCK()
  }
}

proctype Callback() {
  byte me = CALLBACK, job;
  bool more;
  if
  :: run_job()
  :: true
  fi;
  atomic {
    finished[LAST] -> /* a wait that does not drive */
      assert(!callback_ended);
      callback_ended = true;
      ended = ended | BIT(me)
  }
}

proctype Submitter() {
  byte me = SUBMITTER, job, i;
  bool more;
  do
  :: i < WORKS -> submit(i); atomic { i++ }
  :: i == WORKS -> atomic { i = 0; break }
  od;
  if
  :: drive(LAST)
  :: true
  fi;
  atomic { finished[0] && finished[LAST]; ended = ended | BIT(me) }
}

/* getFuture() of work 0, in any thread. */
proctype Asker() {
  future = true;
  mark_future()
}

proctype Waiter() {
  byte me = WAITER, job;
  bool more;
  started[0] > 0 || queued > 0; /* there is a work */
  drive(0);
  ended = ended | BIT(me)
}

proctype Runner() {
  byte me = RUNNER, job, i;
  bool more;
  do
  :: i < RUNS -> run_job(); atomic { i++; started[FIRST_RUN + me] = 0; finished[FIRST_RUN + me] = false }
  :: i == RUNS -> atomic { i = 0; break }
  od;
  ended = ended | BIT(me)
}

proctype Clock() {
  passed = true
}

#ifdef STOP
proctype Stopper() {
  byte me = STOPPER, joined;
  atomic {
    LOCK();
    stopping = true;
    state = state | WANTED;
#ifndef MUTANT_SILENT_STOP
    asleep_wake = 0
#endif
  };
  do
  :: atomic { joined < threads -> UNLOCK() };
     atomic { ended_threads & BIT(joined) -> joined++ };
     atomic { LOCK() }
  :: atomic { joined == threads -> joined = 0; break }
  od;
  do
  :: atomic { IS_BUSY }; await_turn()
  :: atomic { !IS_BUSY -> break }
  od;
  atomic {
    if
    :: state == WANTED -> release()
    :: else
    fi;
    UNLOCK();
    ended = ended | BIT(me)
  }
}
#endif

#define DONE (ended == ALL && next_work == WORKS && callback_ended)
#ifdef STOP
#define AT_REST (ended_threads == BIT(threads) - 1)
#define AFTER (state & WANTED) /* who comes after stop() finds out that nobody is there */
#else
#define AT_REST (free_threads == threads && asleep_wake == BIT(threads) - 1)
#define AFTER 0
#endif

init {
  atomic {
    run Submitter();
#ifdef STOP
    run Stopper();
#else
    ended = ended | BIT(STOPPER);
#endif
#ifdef WAIT
    run Waiter();
    if
    :: run Clock()
    :: true
    fi;
#else
    ended = ended | BIT(WAITER);
#endif
#if RUNS > 0
    run Runner();
#else
    ended = ended | BIT(RUNNER);
#endif
#ifdef FUTURE
    run Asker()
#else
    ended = ended | BIT(CALLBACK);
    callback_ended = true
#endif
  };
  atomic {
    DONE && !locked && AT_REST ->
      assert(queued == 0 && waiters == 0 && asleep_turn == 0 && state == AFTER);
      over = true
  }
}

ltl all_is_done { <> over }
