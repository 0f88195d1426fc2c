#!/usr/bin/env bash
# Proves the models of this folder with spin, and that spin finds what is wrong with their mutants. See README.md.
#
#   run.sh [--quick]    --quick leaves out the proofs that visit more than 300,000 states, and all mutants but one of
#                       each model: nine tenths of the time
#
# Exit status: 0 if all is as it must be, 1 if not, 77 if a tool is missing. CFLAGS go to the C compiler.
set -euo pipefail
export LC_ALL=C

here=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)
need() {
  command -v "$1" >/dev/null && return
  echo "$1 is not installed; Debian has it in the package '$2'."
  exit 77
}
need spin spin
need cc gcc

work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
surprises=0
quick=no
[[ ${1:-} != --quick ]] || quick=yes

# run WHAT MODEL [NAME[=VALUE]…]: WHAT is "holds", or what must go wrong: "assert" (an assertion fails) or "stuck" (a
# rank never ends). Anything else is a surprise, and what spin says of it is shown, with the run that it found.
run() {
  local what=$1 model=$2 began=$EPOCHREALTIME flags=() optimize=-O0 found states verdict=ok
  shift 2
  flags=("${@/#/-D}")
  # Only there is it worth the compiler's time.
  [[ $what == holds && ($quick$model == norings || " $* " == *" RANKS=3 "*) ]] && optimize=-O1
  rm -rf "${work:?}/run" && mkdir "$work/run" && cd "$work/run"
  {
    spin -P"cc -E -x c" "${flags[@]}" -a "$here/$model.pml" &&
      cc "$optimize" -w -DMEMLIM=1900 ${CFLAGS:-} -o pan pan.c &&
      ./pan -a -m20000 -w21
  } >log 2>&1 || true

  if ! grep -q 'errors: [0-9]' log; then
    found=broken
  elif grep -q 'errors: 0' log; then
    found=holds
    grep -qE 'Search not completed|max search depth|out of memory' log && found=incomplete
  elif grep -q 'acceptance cycle' log; then
    found=stuck
  else
    found=assert
  fi
  states=$(sed -n 's/^ *\([0-9.e+]*\) states, stored.*/\1/p' log)
  if [[ $found != "$what" ]]; then
    verdict=BAD
    surprises=$((surprises + 1))
  fi
  printf '%-3s %-6s %-10s %9s states %5.1f s  %s\n' "$verdict" "$model" "$found" "${states:--}" \
    "$(awk "BEGIN { print $EPOCHREALTIME - $began }")" "$*"
  [[ $verdict == ok ]] && return
  if [[ -f $model.pml.trail ]]; then
    spin -P"cc -E -x c" "${flags[@]}" -k "$model.pml.trail" -p -g "$here/$model.pml" >>log 2>&1 || true
  fi
  sed 's/^/    /' log
}

# The same for what --quick leaves out.
run_full() { [[ $quick == yes ]] || run "$@"; }

echo "The protocol:"
run holds bell RANKS=2 ROUNDS=3
run holds bell RANKS=2 ROUNDS=3 CRASH
run holds bell RANKS=3 ROUNDS=3
run_full holds bell RANKS=3 ROUNDS=2 CRASH

run holds failure RANKS=2
run_full holds failure RANKS=2 CRASH

run holds slots RANKS=2 OPS=5
run holds slots RANKS=2 OPS=5 LEAVER
run holds slots RANKS=2 OPS=5 LEAVER CRASH
run holds slots RANKS=3 OPS=4
run holds slots RANKS=3 OPS=4 LEAVER
run_full holds slots RANKS=3 OPS=4 LEAVER CRASH

run holds turns RANKS=2 OPS=2
run_full holds turns RANKS=2 OPS=2 CRASH
run_full holds turns RANKS=3 OPS=2 ONLY=PIPELINE
run_full holds turns RANKS=3 OPS=2 BUFFERS=2
run_full holds turns RANKS=3 OPS=1 BUFFERS=4
run_full holds turns RANKS=3 OPS=1 ONLY=PIPELINE CRASH
run_full holds turns RANKS=3 OPS=1 BUFFERS=2 CRASH

run holds rings MESSAGES=2
run_full holds rings MESSAGES=3
run_full holds rings MESSAGES=3 BATCH=2
run_full holds rings MESSAGES=3 CLOSE
run_full holds rings MESSAGES=2 CRASH
run_full holds rings MESSAGES=2 CRASH CLOSE
run_full holds rings MESSAGES=2 GUEST
run_full holds rings MESSAGES=2 GUEST CLOSE

run holds messages
run_full holds messages PIECES
run_full holds messages PIECES SHORT
run_full holds messages SHORT
run_full holds messages QUITS
run_full holds messages DATA=1 RING=3
run_full holds messages REFERENCE
run_full holds messages REFERENCE QUITS
run_full holds messages REFERENCE GIVES_UP
run_full holds messages REFERENCE GIVES_UP ASYNC=2
run_full holds messages REFERENCE FAILS
run_full holds messages REFERENCE ASYNC=2
run_full holds messages REFERENCE ASYNC=1 DATA=1
run_full holds messages ASYNC=1 DATA=1
run_full holds messages ASYNC=2
run_full holds messages ASYNC=1 ANY DATA=1
run_full holds messages ASYNC=3 SHORT DATA=1

run holds posted MESSAGES=2 RECEIVES=2
run_full holds posted
run_full holds posted FAILS
run_full holds posted REFERENCE
run_full holds posted REFERENCE FAILS

run holds collective_queue WORKS=2 WAIT RUNS=1
run_full holds collective_queue WORKS=3 WAIT RUNS=1
run_full holds collective_queue WORKS=2 WAIT RUNS=2
run_full holds collective_queue WORKS=2 FUTURE WAIT
run_full holds collective_queue WORKS=1 STOP RUNS=2
run_full holds collective_queue WORKS=2 STOP WAIT
run_full holds collective_queue WORKS=2 STOP FUTURE

echo "Mutants:"
run_full stuck bell RANKS=2 MUTANT_NO_RING_FENCE
run stuck bell RANKS=2 MUTANT_NO_SLEEP_FENCE
run_full stuck bell RANKS=2 MUTANT_NO_RECHECK
run_full stuck bell RANKS=2 MUTANT_SEEN_LATE
run_full stuck bell RANKS=2 MUTANT_WAKE_FIRST
run_full stuck bell RANKS=3 MUTANT_WAKE_ONE
run_full stuck bell RANKS=2 MUTANT_FUTEX_TORN
run_full stuck bell RANKS=2 CRASH MUTANT_SILENT_ABORT

run assert failure MUTANT_WORD_FIRST
run_full assert failure MUTANT_LAST_WINS
run_full assert failure MUTANT_REPORTS_AGAIN
run_full assert failure MUTANT_NO_LOCK

run_full assert slots RANKS=2 MUTANT_ONE_SLOT
run assert slots RANKS=2 MUTANT_FLAG_FIRST
run_full stuck slots RANKS=2 MUTANT_SILENT_ANNOUNCE
run_full assert slots RANKS=2 MUTANT_NO_LAST_LOOK
run_full assert slots RANKS=3 CRASH MUTANT_NO_CHECK
run_full stuck slots RANKS=2 CRASH MUTANT_SILENT_ABORT
run_full stuck slots RANKS=2 LEAVER MUTANT_SILENT_LEAVE
run_full stuck slots RANKS=2 LEAVER CRASH MUTANT_WATCH_IGNORES_LEFT

run assert turns RANKS=2 MUTANT_NO_DONE
run_full assert turns RANKS=2 MUTANT_DONE_FIRST
run_full assert turns RANKS=2 MUTANT_FLAG_FIRST
run_full assert turns RANKS=2 MUTANT_NO_ENTER
run_full assert turns RANKS=2 MUTANT_ONE_SYNC
run_full assert turns RANKS=2 ONLY=PIPELINE BUFFERS=2
run_full assert turns RANKS=2 ONLY=PIPELINE MUTANT_NO_REDUCED

run_full stuck rings MUTANT_NO_SEND_FENCE
run stuck rings MUTANT_NO_LAST_LOOK
run_full assert rings CLOSE MUTANT_CLOSED_LATE
run_full stuck rings MUTANT_NO_POLL_FENCE
run_full stuck rings MUTANT_NO_READ_FENCE
run_full stuck rings MUTANT_NO_WANTS_FENCE
run_full stuck rings MUTANT_WAIT_UNSAID
run_full stuck rings MUTANT_FORGETS_REST
run_full assert rings MUTANT_TAIL_FIRST
run_full assert rings MUTANT_HEAD_FIRST
run_full assert rings CLOSE MUTANT_CLOSE_FIRST
run_full stuck rings MESSAGES=1 GUEST MUTANT_HUSH_FORGETS
run_full stuck rings MESSAGES=2 CRASH MUTANT_SILENT_DEATH
run_full stuck rings LARGEST=3

run stuck messages MUTANT_SILENT_READ
run_full assert messages MUTANT_COUNTER_FIRST
run_full assert messages DATA=1 MUTANT_EMPTY_FIRST
run_full stuck messages MUTANT_LOOKS_FIRST
run_full assert messages ANY DATA=1 MUTANT_ANY_EMPTY_FIRST
run_full stuck messages ASYNC=1 MUTANT_SLEEPS_IDLE
run_full stuck messages SHORT MUTANT_SILENT_LEAVE
run_full assert messages REFERENCE GIVES_UP MUTANT_NO_LOOK
run_full assert messages REFERENCE GIVES_UP MUTANT_LEAVING_UNSEEN
run_full assert messages REFERENCE GIVES_UP ASYNC=2 MUTANT_STOPS_FIRST
run_full assert messages REFERENCE FAILS MUTANT_FAILURE_UNSEEN
run_full assert messages REFERENCE MUTANT_LEFT_IS_LOST
run_full assert messages REFERENCE ASYNC=1 DATA=1 MUTANT_COMPLETE_FIRST

run assert posted MUTANT_NO_POSITION
run_full assert posted MUTANT_NO_TAG
run_full assert posted MUTANT_POSITION_FIRST
run_full assert posted MUTANT_YOUNGEST
run_full assert posted REFERENCE MUTANT_POSTS_AMID
run_full assert posted REFERENCE MUTANT_CLAIMED_LATE
run_full assert posted REFERENCE FAILS MUTANT_NOT_SAID

run_full assert collective_queue WORKS=2 WAIT MUTANT_NOT_TAKEN
run stuck collective_queue WORKS=2 WAIT RUNS=1 MUTANT_WAITERS_ONLY
run_full assert collective_queue WORKS=2 WAIT MUTANT_SUBMIT_UNWANTED
run_full assert collective_queue WORKS=1 WAIT RUNS=1 MUTANT_BLIND_GIVE_BACK
run_full assert collective_queue WORKS=2 WAIT MUTANT_LEFT_WANTED
run_full assert collective_queue WORKS=2 WAIT MUTANT_STILL_COUNTED
run_full stuck collective_queue WORKS=2 FUTURE MUTANT_NO_SPARE
run_full stuck collective_queue WORKS=2 FUTURE MUTANT_FUTURE_EARLY
run_full assert collective_queue WORKS=2 FUTURE MUTANT_MARK_TWICE
run_full stuck collective_queue WORKS=1 STOP RUNS=1 MUTANT_STOP_UNWANTED
run_full stuck collective_queue WORKS=1 STOP RUNS=1 MUTANT_NO_WANT
run_full stuck collective_queue WORKS=1 STOP RUNS=1 MUTANT_WANT_LATE
run_full stuck collective_queue WORKS=1 STOP RUNS=1 MUTANT_SILENT_STOP

echo "$SECONDS s, $surprises surprises"
((surprises == 0))
