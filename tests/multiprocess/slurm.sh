#!/usr/bin/env bash
# slurm.sh MUSTER WORLD_PROGRAM LAUNCH_PROGRAM: jobs under a Slurm of one node, which this starts for itself and ends
# again: a munge with a key of its own, ports of its own on the loopback, all its files in one new folder.
# Exit status: 0 if all went well, 77 if such a Slurm cannot run here, else something else.
set -euo pipefail
(($# == 3)) || { echo "usage: $0 MUSTER WORLD_PROGRAM LAUNCH_PROGRAM" >&2; exit 2; }
muster=$1 world_program=$2 launch_program=$3

skip() {
  echo "no Slurm here: $*"
  exit 77
}

PATH+=:/usr/sbin:/sbin  # where daemons are
missing=()
for pair in munged:munge slurmctld:slurm-wlm slurmd:slurm-wlm srun:slurm-wlm; do
  command -v "${pair%:*}" >/dev/null || [[ " ${missing[*]} " == *" ${pair#*:} "* ]] || missing+=("${pair#*:}")
done
((${#missing[@]} == 0)) || skip "apt-get install ${missing[*]}"
((EUID == 0)) || skip "only root may start its daemons"

# What an outer job says is not for the inner ones.
unset "${!SLURM@}" "${!SBATCH@}" "${!OMPI@}" "${!PMI@}" "${!MUSTER@}" RANK WORLD_SIZE MASTER_ADDR MASTER_PORT \
  JOB_COMPLETION_INDEX

# ----------------------------------------------------------------------------------------------- processes and patience

folder=$(mktemp -d)
chmod 711 "$folder"  # munge wants its socket's folder open to all
daemons=()

# Prints the processes of jobs, which have a mark in their environment.
in_jobs() {
  local environment
  for environment in /proc/[0-9]*/environ; do
    ! grep -qzFx "MUSTER_SLURM_TEST=$folder" "$environment" 2>/dev/null || basename "${environment%/environ}"
  done
}
no_job() { [[ -z $(in_jobs) ]]; }

# Prints the daemons and what watches jobs for them, which has a new environment but works in the same folder.
in_daemons() {
  local process
  for process in /proc/[0-9]*; do
    [[ $(readlink "$process/cwd") != "$folder/spool" ]] || basename "$process"
  done
}

# wait_until SECONDS COMMAND…: until it succeeds; fails where it has not by then.
wait_until() {
  local end=$((SECONDS + $1))
  shift
  until "$@"; do
    ((SECONDS < end)) || return 1
    sleep 0.05
  done
}

all_ended() { [[ -z $(jobs -pr) ]]; }

clean_up() {
  local status=$? pid
  trap - EXIT
  set +e
  for pid in $(in_jobs); do kill -KILL "$pid" 2>/dev/null; done
  ((${#daemons[@]} == 0)) || kill "${daemons[@]}" 2>/dev/null
  wait_until 10 all_ended
  for pid in $(in_daemons); do kill -KILL "$pid" 2>/dev/null; done
  wait 2>/dev/null
  rm -rf "$folder"
  exit "$status"
}
trap clean_up EXIT
trap 'exit 1' HUP INT TERM

# The kernel ends these should we be killed.
start_daemon() { # NAME COMMAND…
  local name=$1
  shift
  (cd "$folder/spool" && exec setpriv --pdeathsig KILL "$@" >"$folder/$name.out" 2>&1 </dev/null) &
  daemons+=($!)
}

# A port that nobody listens at, below those that the kernel gives to clients.
free_port() {
  local port
  while :; do
    port=$((20000 + RANDOM % 12000))
    [[ " ${ports[*]:-} " == *" $port "* ]] || (: <"/dev/tcp/127.0.0.1/$port") 2>/dev/null || break
  done
  ports+=("$port")
}

# ---------------------------------------------------------------------------------------------------------- the Slurm

ports=()
free_port && free_port && free_port
host=$(hostname -s)
mkdir "$folder/state" "$folder/spool"
(umask 077 && head -c 64 /dev/urandom >"$folder/munge.key")
export SLURM_CONF=$folder/slurm.conf
cat >"$SLURM_CONF" <<EOF
ClusterName=muster
SlurmctldHost=$host(127.0.0.1)
SlurmUser=root
SlurmdUser=root
AuthType=auth/munge
AuthInfo=socket=$folder/munge.socket
CredType=cred/munge
CommunicationParameters=NoInAddrAny,NoCtldInAddrAny
SlurmctldPort=${ports[0]}
SlurmdPort=${ports[1]}
StateSaveLocation=$folder/state
SlurmdSpoolDir=$folder/spool
SlurmctldPidFile=$folder/slurmctld.pid
SlurmdPidFile=$folder/slurmd.pid
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
SelectType=select/cons_tres
SelectTypeParameters=CR_CPU
MpiDefault=none
MailProg=/bin/true
ReturnToService=2
SlurmdParameters=config_overrides
NodeName=$host NodeAddr=127.0.0.1 CPUs=8 State=UNKNOWN
PartitionName=test Nodes=ALL Default=YES State=UP
EOF
# No cgroups, which containers often lack. Slurm 22.05 has no such word, but leaves those of version 1 alone when the
# plugins above have no use for them.
version=$(slurmd -V | grep -oE '[0-9]+' | head -n 1)
echo "CgroupPlugin=$( ((version < 24)) && echo cgroup/v1 || echo disabled)" >"$folder/cgroup.conf"

answers() {
  munge --socket="$folder/munge.socket" --no-input 2>/dev/null | unmunge --socket="$folder/munge.socket" >/dev/null 2>&1
}
is_idle() { [[ $(timeout 10 sinfo --noheader --format=%T 2>/dev/null) == idle ]]; }
# is_up COMMAND: it succeeds, or no more waiting for it, since a daemon has ended.
is_up() { "$1" || (($(jobs -pr | wc -l) < ${#daemons[@]})); }

# no_slurm DAEMON…: what they last complained of.
no_slurm() {
  local name words=''
  for name in "$@"; do
    words+="$name: $(grep -ihE 'error:|fatal:' "$folder/$name.out" | grep -vE 'state (save )?file' | tail -n 1); " || true
  done
  skip "${words%; }"
}

start_daemon munged munged --foreground --force --socket="$folder/munge.socket" --key-file="$folder/munge.key" \
  --pid-file="$folder/munged.pid" --log-file="$folder/munged.log" --seed-file="$folder/munged.seed"
{ wait_until 20 is_up answers && answers; } || no_slurm munged
start_daemon slurmctld slurmctld -D
start_daemon slurmd slurmd -D
{ wait_until 60 is_up is_idle && is_idle; } || no_slurm slurmctld slurmd

# ----------------------------------------------------------------------------------------------------------- the tests

out=$folder/out err=$folder/err
srun=(env MUSTER_SLURM_TEST="$folder" setpriv --pdeathsig KILL timeout 60 srun --input none --label)

"${srun[@]}" -n 1 true >"$out" 2>"$err" || skip "srun cannot run true: $(tail -n 1 "$err")"

fail() {
  echo "$title: $*"
  for file in "$out" "$err" "$folder/slurmd.out" "$folder/slurmctld.out"; do
    echo "--- ${file##*/}"
    tail -n 20 "$file"
  done
  exit 1
}

# expect STATUS SRUN'S ARGUMENTS…
expect() {
  local status=0
  "${srun[@]}" "${@:2}" >"$out" 2>"$err" || status=$?
  ((status == $1)) || fail "srun ended with status $status instead of $1"
}

# The lines of `out` that match $1, sorted, are the other arguments.
expect_lines() {
  local lines
  lines=$(grep -oE "$1" "$out" | sort) || true
  [[ $lines == "$(printf '%s\n' "${@:2}")" ]] || fail "these lines are wrong: $lines"
}

nothing_left() {
  wait_until 15 no_job || fail "left behind: $(ps -o pid=,stat=,args= -p "$(in_jobs | paste -sd,)")"
  wait_until 15 is_idle || fail "the node is not idle: $(sinfo --noheader; squeue --noheader)"
  ! (: <"/dev/tcp/127.0.0.1/${ports[2]}") 2>/dev/null || fail "somebody listens at port ${ports[2]} still"
}

# Starts a job in the background, which then runs as long as it may.
start() {
  : >"$out"
  "${srun[@]}" "$@" >"$out" 2>"$err" &
  job=$!
}
job_says() { (($(grep -cE "$1" "$out") == $2)); }
job_runs() { (($(for pid in $(in_jobs); do readlink "/proc/$pid/exe"; done | grep -cFx "$1") == $2)); }
end_of_job() {
  status=0
  wait "$job" || status=$?
}

title='a rank a task'
expect 0 -n 3 "$world_program"
expect_lines 'rank .*' 'rank 0 of 3, local 0 of 3, sum 6, backend shm' 'rank 1 of 3, local 1 of 3, sum 6, backend shm' \
  'rank 2 of 3, local 2 of 3, sum 6, backend shm'
nothing_left

title='a rank a task, who meet over TCP'
MASTER_ADDR=localhost MASTER_PORT=${ports[2]} expect 0 -n 2 "$world_program"
expect_lines 'rank .*' 'rank 0 of 2, local 0 of 2, sum 3, backend shm' 'rank 1 of 2, local 1 of 2, sum 3, backend shm'
nothing_left

title='a launcher'
expect 0 -n 1 "$muster" run -n 2 "$world_program"
expect_lines 'rank .*' 'rank 0 of 2, local 0 of 2, sum 3, backend shm' 'rank 1 of 2, local 1 of 2, sum 3, backend shm'
nothing_left

MUSTER_SECRET=$("$muster" secret)
export MUSTER_SECRET
meet=(--nnodes 2 --rdzv "localhost:${ports[2]}" --rdzv-timeout 30s -n 1)

title='two launchers on one node'
expect 0 -n 2 "$muster" run "${meet[@]}" "$world_program"
expect_lines 'rank .*' 'rank 0 of 2, local 0 of 1, sum 3, backend shm' 'rank 1 of 2, local 0 of 1, sum 3, backend shm'
nothing_left

title='tasks number the launchers'
expect 0 -n 2 "$muster" run "${meet[@]}" "$launch_program" environment
host=$(hostname)  # lines of several hosts are marked with theirs
expect_lines '^.*\<(GROUP_RANK|RANK)=.*' "0: [$host:0] GROUP_RANK=0" "0: [$host:0] RANK=0" \
  "1: [$host:1] GROUP_RANK=1" "1: [$host:1] RANK=1"
nothing_left

title='launchers of two steps'
start -n 1 "$muster" run "${meet[@]}" "$world_program"
"${srun[@]}" -n 1 "$muster" run "${meet[@]}" "$world_program" >"$out.2" 2>"$err.2" || fail "$(cat "$err.2")"
end_of_job
((status == 0)) || fail "srun ended with status $status"
cat "$out.2" >>"$out"
expect_lines 'rank .*' 'rank 0 of 2, local 0 of 1, sum 3, backend shm' 'rank 1 of 2, local 0 of 1, sum 3, backend shm'
nothing_left

title='scancel while ranks wait for one that does not come'
# shellcheck disable=SC2016  # for the tasks to expand
start -n 3 bash -c '((SLURM_PROCID < 2)) && exec "$0"; exec sleep 1000' "$world_program"
wait_until 30 job_runs "$(readlink -f "$world_program")" 2 || fail 'two ranks did not start'
scancel --name=bash
end_of_job
((status != 0)) || fail 'srun ended well'
nothing_left

title='scancel of a launcher'
start -n 1 "$muster" run -n 2 "$launch_program" wait-for "$folder/never"
wait_until 30 job_says 'rank . of 2 waits' 2 || fail 'two ranks did not start'
scancel --name="$(basename "$muster")"
end_of_job
((status == 128 + 15)) || fail "srun ended with status $status"
nothing_left

title='SIGTERM to srun'
start -n 2 "$muster" run "${meet[@]}" "$launch_program" wait-for "$folder/never"
wait_until 30 job_says 'rank . of 2 waits' 2 || fail 'two ranks did not start'
kill -TERM "$job"
end_of_job
((status != 0)) || fail 'srun ended well'
nothing_left

title='a rank of srun dies'
expect $((128 + 11)) -n 3 "$world_program" crash
nothing_left

title='a rank of a launcher fails'
expect 7 -n 1 "$muster" run -n 2 "$launch_program" fail 1 7
grep -qE '^0: muster: rank 1 \(pid [0-9]+\) exited with status 7' "$err" || fail 'the launcher does not say so'
nothing_left

title='a rank of one of two launchers fails'
expect 7 -n 2 "$muster" run "${meet[@]}" "$launch_program" fail 1 7
says='rank 1 \(pid [0-9]+\) exited with status 7'
grep -qE "^1: muster: $says" "$err" || fail 'its launcher does not say so'
grep -qE "^0: muster: on node 1 \('[^']+'\): $says" "$err" || fail 'the other launcher does not say so'
nothing_left
